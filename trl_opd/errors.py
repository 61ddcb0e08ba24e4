"""Errors that are the user's to mend: shown as one message, without a traceback unless `--debug`."""


class UsageError(Exception):
    """The command line or the recipe cannot be understood. Exit code 2."""
