"""Exceptions of the client, each with a one-sentence message. Most are raised by `sluice.http`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.values import Job


def add_suggestion(message: str, suggestion: str) -> str:
    """Append a suggestion, which is a sentence or the nearest valid word, to a message."""
    if not suggestion:
        return message
    if not suggestion.endswith((".", "。")):
        return f"{message} ({suggestion})"
    # Chinese has no space between sentences.
    return message + ("" if message.endswith("。") else " ") + suggestion


@dataclass(frozen=True, slots=True)
class FieldError:
    """One invalid value: its path, the message, and possibly a suggestion.

    `index` is the position of the job file among those that were submitted together, `file` its name.
    """

    path: str
    message: str
    code: str = ""
    suggestion: str = ""
    line: int | None = None
    index: int | None = None
    file: str = ""

    def __str__(self) -> str:
        place = f"{self.file}: " if self.file else ""
        place += f"line {self.line}: " if self.line else ""
        name = f"{self.path}: " if self.path else ""
        return place + name + add_suggestion(self.message, self.suggestion)


class SluiceError(Exception):
    """Base class of the client's errors. `status` is the HTTP status of an error response of Sluice or of a proxy.

    `submitted` are the jobs that `Client.submit_many` had submitted with earlier requests.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        status: int | None = None,
        errors: tuple[FieldError, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.errors = errors
        self.submitted: Sequence[Job] = ()


class Invalid(SluiceError):
    """The request or the job file is invalid; `errors` has the details."""


class CannotRun(SluiceError):
    """The job file is valid, but no node could ever run it."""


class Unauthorized(SluiceError):
    """The request has no token, or one that is unknown, revoked or expired."""


class Forbidden(SluiceError):
    """The user or the token lacks the permission."""


class NotFound(SluiceError):
    """The object does not exist, or the user may not see it."""


class Conflict(SluiceError):
    """The request conflicts with the current state: job ended, object changed since it was read, name taken."""


class TooLarge(SluiceError):
    """The code or the request is larger than the limit."""


class Throttled(SluiceError):
    """Too many requests."""

    def __init__(self, message: str, *, retry_after: float, code: str = "throttled") -> None:
        super().__init__(message, code=code, status=429)
        self.retry_after = retry_after


class ServerFailed(SluiceError):
    """The server responded with an error of its own or of the cluster."""


class Unreachable(SluiceError):
    """The server did not respond."""


class WaitTimeout(SluiceError):
    """The job did not end within the given time; it continues."""


class NotConfigured(SluiceError):
    """Server URL or credentials are missing."""


ERROR_BY_STATUS: dict[int, type[SluiceError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    415: Invalid,
    416: Invalid,
    422: CannotRun,
}
