"""Orders to Slurm about jobs that exist (scancel, scontrol), and questions about Slurm itself.

An order for a job that is already gone is done, not failed: `parse_order` says which ids were unknown. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from clusters.errors import ClusterError, CommandFailed
from clusters.slurm.errors import classify_failure, extract_error_message, raise_for_failure
from clusters.slurm.fields import SlurmCommands, format_minutes, parse_error, parse_int
from clusters.transport.base import CommandResult
from core.messages import _

_ID = re.compile(r"\d+(?:[+_]\d+)?\Z")

SignalTarget = Literal["steps", "batch", "all"]
_SIGNAL_TARGETS: dict[SignalTarget, list[str]] = {
    "steps": [],
    "batch": ["--batch"],
    "all": ["--full"],
}


def _validate_ids(ids: Sequence[str]) -> list[str]:
    for slurm_job_id in ids:
        if not _ID.match(slurm_job_id):
            raise ValueError(f"not a job id: {slurm_job_id!r}")
    return list(ids)


# -- orders -----------------------------------------------------------------------------------------


def build_scancel_argv(
    commands: SlurmCommands,
    *,
    job_ids: Sequence[str],
    user: str = "",
    signal: str = "",
    target: SignalTarget = "steps",
) -> list[str]:
    """Cancel; with `signal` only send it, `to` the steps, the batch script, or both ("all").

    The id of a het leader stands for all its components. With `user`, ids of other people's jobs are
    passed over without a word.
    """
    arguments: list[str] = []
    if user:
        arguments.append(f"--user={user}")
    if signal:
        arguments.append(f"--signal={signal}")
        arguments += _SIGNAL_TARGETS[target]
    return commands.action_argv("scancel", *arguments, *_validate_ids(job_ids))


def build_time_limit_argv(
    commands: SlurmCommands, *, job_ids: Sequence[str], seconds: int
) -> list[str]:
    """Set the time limit, in whole minutes, rounded up. Only an operator may raise it.

    A comma list is allowed. Of a het job the leader's id changes all components at once (seen on 22.05).
    """
    ids = ",".join(_validate_ids(job_ids))
    return commands.action_argv(
        "scontrol", "update", f"JobId={ids}", f"TimeLimit={format_minutes(seconds)}"
    )


def build_hold_argv(commands: SlurmCommands, *, job_ids: Sequence[str]) -> list[str]:
    return commands.action_argv("scontrol", "hold", ",".join(_validate_ids(job_ids)))


def build_release_argv(commands: SlurmCommands, *, job_ids: Sequence[str]) -> list[str]:
    return commands.action_argv("scontrol", "release", ",".join(_validate_ids(job_ids)))


def build_requeue_argv(commands: SlurmCommands, *, job_ids: Sequence[str]) -> list[str]:
    return commands.action_argv("scontrol", "requeue", ",".join(_validate_ids(job_ids)))


@dataclass(frozen=True, slots=True)
class ControlResult:
    """Which jobs Slurm no longer knows or has already ended, and what it refused for others."""

    missing_ids: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()  # Slurm's words, one per job


# "scancel: error: Kill job error on job id 12: Invalid job id specified",
# "Invalid job id specified for job 12", "slurm_update error: Job has already finished"
_NOT_FOUND_MESSAGES = (
    "invalid job id specified",
    "job/step already completing or completed",
    "job has already finished",
)
_REFUSED_MESSAGES = (
    "access/permission denied",
    "invalid user id",  # scontrol update of somebody else's job
    "job is pending execution",
    "job is no longer pending",
    "job is not running",
    "not permitted on individual component",
    "requested time limit is invalid",
    "can not be altered now",
    "requested operation is presently disabled",
)


def parse_control(result: CommandResult) -> ControlResult:
    """Raises SlurmUnavailable where Slurm did not answer, CommandFailed where it refused all of it."""
    missing_ids: list[str] = []
    refusals: list[str] = []
    for line in result.error_text.splitlines():
        lowered = line.lower()
        # A line without a number only repeats the one before it ("slurm_suspend error: Invalid job id specified").
        numbers = re.findall(r"\b\d+(?:[+_]\d+)?\b", line)
        if any(words in lowered for words in _NOT_FOUND_MESSAGES):
            missing_ids += numbers[-1:]
        elif any(words in lowered for words in _REFUSED_MESSAGES):
            refusals.append(extract_error_message(line))
    if result.exit_code != 0 and not missing_ids:
        raise _control_error(result, refusals)
    return ControlResult(tuple(missing_ids), tuple(refusals))


def _control_error(result: CommandResult, refusals: list[str]) -> ClusterError:
    if not refusals:
        return classify_failure(result)
    return CommandFailed(
        _("Slurm refused: %(words)s", words=refusals[0]),
        exit_code=result.exit_code,
        detail=result.error_text,
    )


# -- Slurm itself -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """What of `scontrol show config` matters here."""

    cluster_name: str
    version: str  # "22.05.8"
    min_job_age_s: int | None  # how long slurmctld remembers an ended job
    max_array_size: int | None
    max_job_count: int | None
    accounting: bool  # slurmdbd is in use
    raw: dict[str, str]


def build_show_config_argv(commands: SlurmCommands) -> list[str]:
    return commands.query_argv("scontrol", "show", "config")


def parse_show_config(result: CommandResult) -> SlurmConfig:
    raise_for_failure(result)
    raw: dict[str, str] = {}
    for line in result.text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            raw.setdefault(key.strip(), value.strip())
    if "SLURM_VERSION" not in raw:
        raise parse_error("the configuration has no SLURM_VERSION", result.text[:500])
    return SlurmConfig(
        cluster_name=raw.get("ClusterName", ""),
        version=raw["SLURM_VERSION"],
        min_job_age_s=_parse_first_int(raw.get("MinJobAge", "")),
        max_array_size=_parse_first_int(raw.get("MaxArraySize", "")),
        max_job_count=_parse_first_int(raw.get("MaxJobCount", "")),
        accounting="slurmdbd" in raw.get("AccountingStorageType", ""),
        raw=raw,
    )


def _parse_first_int(text: str) -> int | None:
    """`300 sec`"""
    return parse_int(text.split(" ")[0]) if text else None


def build_ping_argv(commands: SlurmCommands) -> list[str]:
    return commands.query_argv("scontrol", "ping")


@dataclass(frozen=True, slots=True)
class Controller:
    host: str
    role: str  # "primary", "backup", …
    up: bool


# "Slurmctld(primary) at login1 is UP"; several backups: "Slurmctld(backup1) at …"
_PING = re.compile(r"Slurmctld\((?P<role>[^)]+)\) at (?P<host>\S+) is (?P<state>\w+)")


def parse_ping(result: CommandResult) -> list[Controller]:
    """Exit code 1 with all controllers DOWN is an answer too."""
    controllers = [
        Controller(host=match["host"], role=match["role"], up=match["state"] == "UP")
        for match in _PING.finditer(result.text)
    ]
    if not controllers:
        raise_for_failure(result)
        raise parse_error("scontrol ping named no controller", result.text[:500])
    return controllers


def build_version_argv(commands: SlurmCommands) -> list[str]:
    return commands.query_argv("scontrol", "--version")


def parse_version(result: CommandResult) -> tuple[int, int, int]:
    """`slurm-wlm 22.05.8`, `slurm 25.11.0-0rc1`: (year, month, patch)."""
    raise_for_failure(result)
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", result.text)
    if match is None:
        raise parse_error("there is no version", result.text[:200])
    return int(match[1]), int(match[2]), int(match[3])
