"""The errors that a user can put right: one clear message, an exit code and no traceback."""


class UserError(Exception):
    """A failure that has a remedy outside the code.

    Attributes:
        exit_code: the exit code of the process, 1 for a failed run and 2 for bad arguments.
    """

    exit_code = 1


class UsageError(UserError):
    """A bad value on the command line or in a configuration."""

    exit_code = 2
