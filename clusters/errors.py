"""What can go wrong between Sluice and a cluster, as a small tree.

Each error carries a sentence for the person (told in their language where it is shown) and whether trying again can help; raw stderr stays in
`detail`, for the log. No Django and no HTTP here: `gateway` maps these to answers in one table.
"""

from __future__ import annotations

from core.messages import Message


class ClusterError(Exception):
    """Base of everything a cluster may do to us."""

    retryable = False

    def __init__(self, user_message: Message, *, detail: str = "") -> None:
        super().__init__(user_message)
        self.user_message = user_message
        self.detail = detail


class BadArgument(ClusterError, ValueError):
    """What was asked cannot be said to a machine at all (a NUL byte, a path that climbs out)."""


class ConnectFailed(ClusterError):
    """The machine could not be reached. Nothing was started: asking again is safe."""

    retryable = True


class AuthFailed(ClusterError):
    """The machine answered and would not let this identity in."""


class HostKeyMismatch(AuthFailed):
    """The machine showed a host key that is not the pinned one."""


class IdentityRefused(AuthFailed):
    """Sluice itself will not act as this Unix user (root, below the UID floor, not mapped)."""


class OutcomeUnknown(ClusterError):
    """The command was sent and no answer came: it may or may not have done its work.

    Never run it again before looking whether it did.
    """

    retryable = True


class CommandTimeout(OutcomeUnknown):
    """No answer in time."""


class ConnectionLost(OutcomeUnknown):
    """The connection broke after the command was sent."""


class OutputTooLarge(ClusterError):
    """The command printed more than the caller allowed."""


class CommandFailed(ClusterError):
    """A command that should have worked ended with a non-zero exit code."""

    def __init__(self, user_message: Message, *, exit_code: int, detail: str = "") -> None:
        super().__init__(user_message, detail=detail)
        self.exit_code = exit_code


class RemoteFileError(ClusterError):
    """A file operation on the cluster failed."""


class RemoteFileMissing(RemoteFileError):
    """There is no such file or directory."""


class RemotePermissionDenied(RemoteFileError):
    """The Unix user may not do this."""


class RemoteDiskFull(RemoteFileError):
    """No space, or the user's quota is used up."""

    retryable = True


class SlurmUnavailable(ClusterError):
    """slurmctld or slurmdbd did not answer. Says nothing about any job."""

    retryable = True


class SubmitRejected(ClusterError):
    """sbatch refused. `retryable` tells a limit that may pass from a mistake that will not."""

    def __init__(self, user_message: Message, *, retryable: bool = False, detail: str = "") -> None:
        super().__init__(user_message, detail=detail)
        self.retryable = retryable


class SlurmParseError(ClusterError):
    """Slurm answered something that we cannot read. Never taken for 'no such row'."""
