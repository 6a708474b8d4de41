"""`scontrol show node` and `scontrol show partition`: builds the commands, parses their output into a Capacity.

Each command returns all nodes or all partitions of the cluster. Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from clusters.capacity import Capacity, GpuCount, Node, Partition
from clusters.errors import SlurmParseError
from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import (
    SlurmCommands,
    expand_nodes,
    has_value,
    parse_duration_s,
    parse_error,
    parse_int,
    parse_pairs,
)
from clusters.transport.base import CommandResult


def build_show_nodes_argv(commands: SlurmCommands) -> list[str]:
    """argv for all nodes. -d adds GresUsed to the output; -a includes the nodes of hidden partitions."""
    return commands.query_argv("scontrol", "-a", "-o", "-d", "show", "node")


def build_show_partitions_argv(commands: SlurmCommands) -> list[str]:
    return commands.query_argv("scontrol", "-a", "-o", "show", "partition")


def parse_capacity(
    nodes: CommandResult, partitions: CommandResult, *, taken_at: datetime
) -> Capacity:
    return Capacity(
        taken_at=taken_at,
        nodes=parse_show_nodes(nodes),
        partitions=parse_show_partitions(partitions),
    )


def _parse_lines(result: CommandResult, key: str) -> Iterator[tuple[str, dict[str, str]]]:
    for line in result.text.splitlines():
        # "No nodes in the system", "No partitions in the system": valid output without rows.
        if not line.strip() or line.startswith("No "):
            continue
        pairs = parse_pairs(line)
        if key not in pairs:
            raise parse_error(f"a row has no {key}", line)
        yield line, pairs


# -- nodes ------------------------------------------------------------------------------------------


def parse_show_nodes(result: CommandResult) -> tuple[Node, ...]:
    raise_for_failure(result)
    return tuple(_parse_node(line, pairs) for line, pairs in _parse_lines(result, "NodeName"))


def _parse_node(line: str, pairs: dict[str, str]) -> Node:
    try:
        state = parse_node_state(pairs["State"])
        return Node(
            name=pairs["NodeName"],
            state=state.name,
            usable=state.usable,
            # CPUEfctv (since 22.05) excludes cores reserved for the system.
            cpus=_parse_first_int(pairs, "CPUEfctv", "CPUTot"),
            cpus_used=_parse_first_int(pairs, "CPUAlloc"),
            mem_mib=_parse_first_int(pairs, "RealMemory"),
            mem_mib_used=_parse_first_int(pairs, "AllocMem"),
            gpus=_parse_gpus(pairs.get("Gres", ""), pairs.get("GresUsed", "")),
            features=_split_list(pairs.get("ActiveFeatures", "")),
            partitions=_split_list(pairs.get("Partitions", "")),
            # Without the end `[user@time]`: who set the reason, and when.
            reason=re.sub(r"\s*\[[^\]]*\]$", "", pairs.get("Reason", "")),
        )
    except KeyError as error:
        raise parse_error(f"a node has no {error.args[0]}", line) from error
    except SlurmParseError as error:
        raise SlurmParseError(error.user_message, detail=line[:2000]) from error


def _parse_first_int(pairs: dict[str, str], *names: str) -> int:
    """The number in the first of the named fields that has a value. Raises KeyError if none has."""
    for name in names:
        if has_value(pairs.get(name, "")):
            return parse_int(pairs[name]) or 0
    raise KeyError(names[-1])


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word) if has_value(text) else ()


@dataclass(frozen=True, slots=True)
class NodeState:
    name: str  # idle, mixed, allocated, down, drained, draining, …
    usable: bool  # Slurm may start jobs on it, now or when it is free


# State suffixes of sinfo and the corresponding flags of scontrol.
_STATE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
_SHORT_STATES = {
    "ALLOC": "ALLOCATED",
    "MIX": "MIXED",
    "COMP": "COMPLETING",
    "DRNG": "DRAINING",
    "DRAIN": "DRAINED",
    "MAINT": "MAINTENANCE",
    "RESV": "RESERVED",
    "UNK": "UNKNOWN",
    "FUTR": "FUTURE",
    "PLND": "PLANNED",
    "POW_DN": "POWERED_DOWN",
    "POW_UP": "POWERING_UP",
}
# Slurm starts no job on a node with one of these flags. Not listed: PLANNED, COMPLETING and the power states, which
# end by themselves.
_UNUSABLE_FLAGS = frozenset(
    {
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "NOT_RESPONDING",
        "NO_RESPOND",
        "MAINTENANCE",
        "RESERVED",
        "INVALID_REG",
        "INVAL",
        "BLOCKED",  # 24.05
        "EXTERNAL",  # 25.05: not managed by Slurm
    }
)


def parse_node_state(text: str) -> NodeState:
    """Parse scontrol's `IDLE+DRAIN+NOT_RESPONDING` and `DOWN*`, and sinfo's `mix-`, `idle~`, `alloc+`, `drng`."""
    names: list[str] = []
    for name_and_suffixes in text.strip().upper().split("+"):
        base_name = name_and_suffixes.rstrip("*~#!%$@^-")
        names += [_SHORT_STATES.get(base_name, base_name)] if base_name else []
        names += [_STATE_SUFFIXES[suffix] for suffix in name_and_suffixes[len(base_name) :]]
    if not names:
        raise parse_error("a node has no state", text)
    base = names[0]
    draining = {"DRAIN", "DRAINED", "DRAINING"} & set(names)
    if base == "DOWN":
        name = "down"
    elif draining:
        busy = base in ("MIXED", "ALLOCATED", "DRAINING") or "COMPLETING" in names[1:]
        name = "draining" if busy else "drained"
    else:
        special = [flag for flag in names if flag in _UNUSABLE_FLAGS]
        name = (special[0] if special else base).lower()
    usable = base not in ("DOWN", "ERROR", "FUTURE", "UNKNOWN", "INVAL") and not (
        _UNUSABLE_FLAGS & set(names)
    )
    return NodeState(name={"maintenance": "maint"}.get(name, name), usable=usable)


# `gpu:a100:4(S:0-1)`, `gpu:4`, `gpu:(null):2(IDX:0,2-3)`, `shard:a100:8`; types may contain dots (MIG: 1g.5gb).
_GRES = re.compile(
    r"(?P<name>[A-Za-z]\w*)(?::(?P<type>\(null\)|[^:,()]*[^:,()\d][^:,()]*|\d+(?=:)))?"
    r":(?P<count>\d+)(?P<scale>[KMGTP]?)(?:\((?P<detail>[^)]*)\))?(?:,|\Z)"
)
_SCALE = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}


def parse_gres(text: str) -> dict[tuple[str, str], int]:
    """Parse a gres list into (name, type) → count. The type is "" if the site configures no types."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    position = 0
    text = text.strip().removeprefix("gres:") if has_value(text) else ""
    while position < len(text):
        match = _GRES.match(text, position)
        if match is None:
            raise parse_error(f"“{text[position:]}” is not a generic resource", text)
        gres_type = "" if match["type"] in (None, "(null)") else match["type"].lower()
        counts[match["name"].lower(), gres_type] += int(match["count"]) * _SCALE[match["scale"]]
        position = match.end()
    return dict(counts)


def _parse_gpus(gres: str, used: str) -> tuple[GpuCount, ...]:
    total = {kind: count for (name, kind), count in parse_gres(gres).items() if name == "gpu"}
    in_use = {kind: count for (name, kind), count in parse_gres(used).items() if name == "gpu"}
    if len(total) == 1 and set(in_use) == {""}:
        # GresUsed has no type, so the GPUs in use are of the node's only type.
        in_use = {next(iter(total)): in_use[""]}
    return tuple(
        GpuCount(kind, total[kind], min(in_use.get(kind, 0), total[kind])) for kind in sorted(total)
    )


# -- partitions -------------------------------------------------------------------------------------


def parse_show_partitions(result: CommandResult) -> tuple[Partition, ...]:
    raise_for_failure(result)
    return tuple(
        _parse_partition(line, pairs) for line, pairs in _parse_lines(result, "PartitionName")
    )


def _parse_partition(line: str, pairs: dict[str, str]) -> Partition:
    try:
        return Partition(
            name=pairs["PartitionName"],
            up=pairs["State"].upper() == "UP",
            is_default=pairs.get("Default", "") == "YES",
            nodes=expand_nodes(pairs.get("Nodes", "")),
            max_time_s=parse_duration_s(pairs["MaxTime"]),
            default_time_s=parse_duration_s(pairs.get("DefaultTime", "")),
            max_nodes_per_job=parse_int(pairs.get("MaxNodes", "")),
            allowed_accounts=_parse_allowed(pairs.get("AllowAccounts", "")),
            allowed_qos=_parse_allowed(pairs.get("AllowQos", "")),
            qos=_parse_qos(pairs.get("QoS", "")),
        )
    except KeyError as error:
        raise parse_error(f"a partition has no {error.args[0]}", line) from error
    except SlurmParseError as error:
        raise SlurmParseError(error.user_message, detail=line[:2000]) from error


def _parse_qos(text: str) -> str:
    return text if has_value(text) else ""


def _parse_allowed(text: str) -> tuple[str, ...]:
    """Parse `ALL` or a list; empty if all are allowed. With DenyAccounts, Slurm prints no AllowAccounts."""
    return () if text.strip().upper() == "ALL" else _split_list(text)
