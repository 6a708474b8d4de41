"""Errors of connections to a cluster, of commands and files on it, and of Slurm.

    ClusterError
    ├── BadArgument (also a ValueError)
    ├── ConnectFailed             retryable
    │   └── LoginFailed           retryable
    ├── AuthFailed
    │   ├── HostKeyMismatch
    │   └── IdentityRefused
    ├── OutcomeUnknown            retryable, after checking the outcome
    │   ├── CommandTimeout
    │   │   └── LoginTimeout
    │   └── ConnectionLost
    ├── OutputTooLarge
    ├── CommandFailed
    ├── RemoteFileError
    │   ├── RemoteFileMissing
    │   ├── RemotePermissionDenied
    │   └── RemoteDiskFull        retryable
    ├── SlurmUnavailable          retryable
    ├── SubmitRejected            retryable or not, set per error
    │   └── SubmissionAbandoned   (clusters.slurm.sbatch)
    └── SlurmParseError

`user_message` is for the person, translated when shown; `detail` holds raw stderr for the log. No Django or HTTP
types here: `gateway.problems` maps these errors to HTTP responses.
"""

from __future__ import annotations

from core.messages import Message


class ClusterError(Exception):
    """Base class. `retryable`: the same request can succeed later without a change."""

    retryable = False

    def __init__(self, user_message: Message, *, detail: str = "") -> None:
        super().__init__(user_message)
        self.user_message = user_message
        self.detail = detail


class BadArgument(ClusterError, ValueError):
    """The argument cannot be passed to a command (a NUL byte, a path with `..`)."""


class ConnectFailed(ClusterError):
    """The host could not be reached. Nothing was started, so a retry is safe."""

    retryable = True


class LoginFailed(ConnectFailed):
    """The host was reached, but the login of this Unix user did not complete. Other users may be able to log in."""


class AuthFailed(ClusterError):
    """The host refused the login."""


class HostKeyMismatch(AuthFailed):
    """The host presented a key that is not pinned."""


class IdentityRefused(AuthFailed):
    """Sluice refuses to act as this Unix user: it is root, has too low a UID, or is not mapped to the person."""


class OutcomeUnknown(ClusterError):
    """The command was sent, but its result was not received: it may or may not have run.

    Check the outcome before running it again.
    """

    retryable = True


class CommandTimeout(OutcomeUnknown):
    """No result within the timeout."""


class LoginTimeout(CommandTimeout):
    """The login shell did not begin to run the command in time: a start-up file or the home directory hangs."""


class ConnectionLost(OutcomeUnknown):
    """The connection broke after the command was sent."""


class OutputTooLarge(ClusterError):
    """The command printed more than max_output_bytes."""


class CommandFailed(ClusterError):
    """A command ended with a non-zero exit code, or Slurm refused the request."""

    def __init__(self, user_message: Message, *, exit_code: int, detail: str = "") -> None:
        super().__init__(user_message, detail=detail)
        self.exit_code = exit_code


class RemoteFileError(ClusterError):
    """A file operation on the cluster failed."""


class RemoteFileMissing(RemoteFileError):
    """There is no such file or directory."""


class RemotePermissionDenied(RemoteFileError):
    """The Unix user lacks the permission."""


class RemoteDiskFull(RemoteFileError):
    """No space left, or the user's quota is exceeded."""

    retryable = True


class SlurmUnavailable(ClusterError):
    """slurmctld or slurmdbd did not answer. Nothing follows from this about the state of any job."""

    retryable = True


class SubmitRejected(ClusterError):
    """sbatch refused the job. `retryable`: a temporary limit, not a mistake in the request."""

    def __init__(self, user_message: Message, *, retryable: bool = False, detail: str = "") -> None:
        super().__init__(user_message, detail=detail)
        self.retryable = retryable


class SlurmParseError(ClusterError):
    """Slurm's output could not be parsed. Must not be treated as an empty result."""
