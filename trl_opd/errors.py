"""Errors that are the user's to mend: shown as one message, without a traceback unless `--debug`."""


class UsageError(Exception):
    """The command line or the recipe cannot be understood. Exit code 2."""


class RunError(RuntimeError):
    """Training cannot go on, for a reason outside the code: a full disk, numbers that are not finite. Exit code 1.

    `everywhere` is false where one process may be the only one to know.
    """

    def __init__(self, message: str, everywhere: bool = True):
        super().__init__(message)
        self.everywhere = everywhere


class NonFiniteError(RunError):
    """A loss or a gradient that is not finite. No weight was changed by it."""
