"""Errors that users see, and the one table of exit codes.

Every message names the value, the place and the cure. An exception that is not a
`FastServeError` is a bug and is shown with its traceback.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process's exit status says to scripts."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    SOME_LINES_FAILED = 3
    STOPPED_EARLY = 75
    """Stopped before the work was finished; run the same command again to go on."""


class FastServeError(Exception):
    """Base of all errors that are somebody's to cure; carries the exit code it ends a command with."""

    exit_code = ExitCode.INTERNAL


class ConfigError(FastServeError):
    """An option, an environment variable or their combination cannot work."""

    exit_code = ExitCode.USAGE


class ModelError(FastServeError):
    """A model directory or file is missing, broken or of an unsupported kind."""

    exit_code = ExitCode.USAGE


class EndpointError(FastServeError):
    """No server answers under the endpoint that was named."""

    exit_code = ExitCode.INTERNAL


class RankError(FastServeError):
    """A rank died, hangs or raised."""


class StoppedError(FastServeError):
    """The run was told to end before its work was finished."""

    exit_code = ExitCode.STOPPED_EARLY


class RequestError(FastServeError):
    """A request was refused. `code` is stable for programs, the text is for people."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.code = code


class BusyError(RequestError):
    """The server's inbox is full; the request was not taken and may be sent again."""

    exit_code = ExitCode.INTERNAL

    def __init__(self, message: str):
        super().__init__(message, code="busy")
