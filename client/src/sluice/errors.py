"""Exceptions of the client, each with a one-sentence message. Most are raised by `sluice.http`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One invalid value: its path, the problem, and possibly a suggestion."""

    path: str
    message: str
    code: str = ""
    suggestion: str = ""
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        name = f"{self.path}: " if self.path else ""
        hint = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}{name}{self.message}{hint}"


class SluiceError(Exception):
    """Base class: an error response of Sluice, or of a proxy in front of it."""

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


class Invalid(SluiceError):
    """The request or the job file is invalid; `errors` has the details."""


class CannotRun(SluiceError):
    """The job file is valid, but no node could ever run it."""


class Unauthorized(SluiceError):
    """No token, or one that is unknown, revoked or expired."""


class Forbidden(SluiceError):
    """The user or the token lacks the permission."""


class NotFound(SluiceError):
    """It does not exist, or you may not see it."""


class Conflict(SluiceError):
    """Conflict with the current state: already ended, changed since it was read, name taken."""


class TooLarge(SluiceError):
    """Larger than the server accepts."""


class Throttled(SluiceError):
    """Too many requests."""

    def __init__(self, message: str, *, retry_after: float, code: str = "throttled") -> None:
        super().__init__(message, code=code, status=429)
        self.retry_after = retry_after


class ServerFailed(SluiceError):
    """Sluice responded, but it or its cluster failed."""


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
