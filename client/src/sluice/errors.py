"""What can go wrong, as exceptions that say it in one sentence. The HTTP door alone raises most of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldError:
    """One value at fault: where it stands, what is wrong, perhaps the nearest right one."""

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
    """Anything that Sluice, or the way to it, answered instead of what was asked."""

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
    """The request or the job file is not right; `errors` says where."""


class CannotRun(SluiceError):
    """The job file is right, but no machine here could ever run it."""


class Unauthorized(SluiceError):
    """No token, or one that is unknown, revoked or expired."""


class Forbidden(SluiceError):
    """Known, but not allowed."""


class NotFound(SluiceError):
    """There is no such thing, or it may not be seen."""


class Conflict(SluiceError):
    """It does not fit the present state: ended already, changed by another, name taken."""


class TooLarge(SluiceError):
    """More than the server takes."""


class Throttled(SluiceError):
    """Too many requests."""

    def __init__(self, message: str, *, retry_after: float, code: str = "throttled") -> None:
        super().__init__(message, code=code, status=429)
        self.retry_after = retry_after


class ServerFailed(SluiceError):
    """Sluice answered, but could not do it: its own fault or its cluster's."""


class Unreachable(SluiceError):
    """No answer came from the address."""


class WaitTimeout(SluiceError):
    """The job had not ended within the given time. It goes on."""


class NotConfigured(SluiceError):
    """Nobody said where Sluice is, or who asks."""


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
