"""scontrol's read-only commands about one job and about Slurm itself: show job, show config, ping, --version.

scontrol commands that change a job are in `control`, nodes and partitions in `nodes`. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusters.slurm.errors import is_not_found, raise_for_failure
from clusters.slurm.fields import SlurmCommands, parse_error, parse_int, parse_pairs
from clusters.transport.base import CommandResult


def build_show_job_argv(commands: SlurmCommands, *, slurm_job_id: str) -> list[str]:
    return commands.query_argv("scontrol", "-o", "-d", "show", "job", slurm_job_id)


def parse_show_job(result: CommandResult) -> list[dict[str, str]]:
    """All fields that slurmctld has of a job, one mapping per component or array task; empty if unknown.

    For display only: free text (JobName, Comment) is not delimited and can imitate fields.
    """
    if is_not_found(result):
        return []
    raise_for_failure(result)
    return [parse_pairs(line) for line in result.text.splitlines() if line.startswith("JobId=")]


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """The settings of `scontrol show config` that Sluice uses; `raw` has all."""

    cluster_name: str
    version: str  # "22.05.8"
    min_job_age_s: int | None  # how long slurmctld keeps an ended job
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
        raise parse_error("scontrol show config printed no SLURM_VERSION", result.text[:500])
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
    """Parse the number in a value such as `300 sec`."""
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
    """Parse the output of scontrol ping, also if it exits with 1 because all controllers are DOWN."""
    controllers = [
        Controller(host=match["host"], role=match["role"], up=match["state"] == "UP")
        for match in _PING.finditer(result.text)
    ]
    if not controllers:
        raise_for_failure(result)
        raise parse_error("scontrol ping printed no controller", result.text[:500])
    return controllers


def build_version_argv(commands: SlurmCommands) -> list[str]:
    return commands.query_argv("scontrol", "--version")


def parse_version(result: CommandResult) -> tuple[int, int, int]:
    """Parse `slurm-wlm 22.05.8` or `slurm 25.11.0-0rc1` into (year, month, patch)."""
    raise_for_failure(result)
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", result.text)
    if match is None:
        raise parse_error("scontrol printed no version number", result.text[:200])
    return int(match[1]), int(match[2]), int(match[3])
