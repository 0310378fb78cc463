"""The split of a built-in corpus into training and held-out parts."""

import hashlib


def is_heldout(name: str, percent: int) -> bool:
    """Whether the file or day of this name is held out: a fixed function of the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100 < percent
