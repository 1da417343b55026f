"""The errors that users see."""


class UserError(Exception):
    """A mistake in what the user supplied. Commands print it as one line (`error: …`) and exit with code 2.

    The message says what is wrong, where (file and key) and what to do about it.
    """


class Interrupted(Exception):
    """The run stopped early because somebody asked it to; the message says what is saved and how to go on.

    `code` is the exit code: 128 + the signal's number.
    """

    def __init__(self, message: str, code: int = 130):
        super().__init__(message)
        self.code = code
