"""The error that users see."""


class UserError(Exception):
    """A mistake in what the user supplied. Commands print it as one line (`error: …`) and exit with code 2.

    The message says what is wrong, where (file and key) and what to do about it.
    """
