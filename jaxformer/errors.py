"""The exception for all user errors, which the command line prints without a traceback."""


class UserError(ValueError):
    """Invalid input; the message names the field or file, the value and the fix."""
