"""scontrol's read-only commands about Slurm itself: show config, ping, --version.

scontrol commands that change a job are in `control`, nodes and partitions in `nodes`. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import SlurmCommands, parse_error
from clusters.transport.base import CommandResult


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """The settings of `scontrol show config` that Sluice uses."""

    cluster_name: str
    accounting: bool  # slurmdbd is in use
    enforces_associations: bool  # a user without an association cannot submit


def build_show_config_argv(commands: SlurmCommands) -> list[str]:
    return commands.query_argv("scontrol", "show", "config")


def parse_show_config(result: CommandResult) -> SlurmConfig:
    raise_for_failure(result)
    settings: dict[str, str] = {}
    for line in result.text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            settings.setdefault(key.strip(), value.strip())
    if "SLURM_VERSION" not in settings:
        raise parse_error("scontrol show config printed no SLURM_VERSION", result.text[:500])
    enforced = settings.get("AccountingStorageEnforce", "")
    return SlurmConfig(
        cluster_name=settings.get("ClusterName", ""),
        accounting="slurmdbd" in settings.get("AccountingStorageType", ""),
        enforces_associations="associations" in enforced or "limits" in enforced,
    )


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
