"""The one exception a user's mistake raises; the command line prints it without a traceback."""


class UserError(ValueError):
    """Bad input: the message names the field or file, the value and the fix."""
