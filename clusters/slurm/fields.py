"""Slurm's value formats: times, durations, memory, TRES, node lists, rows; and the common part of every argv.

All parsers of this package use these functions, so that values such as "N/A", `1-02:03:04` and `2Gn`, and truncated
rows, are handled only here. Pure.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from ClusterShell.NodeSet import NodeSet, NodeSetException

from clusters.errors import SlurmParseError
from core.messages import msg

NO_VALUE = frozenset({"", "N/A", "NONE", "UNKNOWN", "(NULL)", "NOT_SET", "INVALID", "NULL"})
# Times, limits and TRES repeat in the thousands of rows of a poll: caching the parsed values halves the time.
PARSE_CACHE_SIZE = 8192
UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "PARTITION_LIMIT"})

# Environment variables that change or filter the output of commands; a person's login shell may set them. For example,
# `squeue -o` fails if SQUEUE_FORMAT2 is set.
_FILTER_VARIABLES = (
    "SLURM_CLUSTERS",
    "SQUEUE_ACCOUNT",
    "SQUEUE_ARRAY",
    "SQUEUE_FORMAT",
    "SQUEUE_FORMAT2",
    "SQUEUE_LICENSES",
    "SQUEUE_NAMES",
    "SQUEUE_PARTITION",
    "SQUEUE_PRIORITY",
    "SQUEUE_QOS",
    "SQUEUE_SORT",
    "SQUEUE_STATES",
    "SQUEUE_USERS",
    "SINFO_FORMAT",
    "SINFO_PARTITION",
    "SACCT_FEDERATION",
    "SACCT_LOCAL",
)


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """Locations of Slurm's programs and configuration; builds the beginning of every argv."""

    bin_dir: str = ""  # "": found through PATH
    slurm_conf: str = ""  # "": Slurm's default location

    def program(self, name: str) -> str:
        return f"{self.bin_dir.rstrip('/')}/{name}" if self.bin_dir else name

    def query_argv(self, name: str, *arguments: str) -> list[str]:
        """argv of a read-only command. It prints times as epoch seconds and ignores the login environment.

        TZ=UTC is for times that Slurm prints without SLURM_TIME_FORMAT, and for times in arguments (sacct -S).
        """
        unset = [part for variable in _FILTER_VARIABLES for part in ("-u", variable)]
        settings = ["TZ=UTC", "SLURM_TIME_FORMAT=%s", *self._conf_env()]
        return ["env", *unset, *settings, self.program(name), *arguments]

    def action_argv(self, name: str, *arguments: str) -> list[str]:
        """argv of a command that changes something. Sets only SLURM_CONF: sbatch passes its environment to the job."""
        conf = self._conf_env()
        return [*(["env", *conf] if conf else []), self.program(name), *arguments]

    def _conf_env(self) -> list[str]:
        return [f"SLURM_CONF={self.slurm_conf}"] if self.slurm_conf else []


# -- rows -------------------------------------------------------------------------------------------


# The first character of every separator of `new_separator`.
FIELD_SEPARATOR = "\x1f"


def new_separator() -> str:
    """A random field separator for one command, which no job name or directory can contain.

    Users choose job names and directories, with newlines and control characters: a fixed separator would
    let a job name forge a row.
    """
    return f"{FIELD_SEPARATOR}{secrets.token_hex(4)}"


def parse_error(what: str, row: str) -> SlurmParseError:
    shown = row if len(row) <= 500 else f"{row[:500]}… ({len(row)} characters)"
    return SlurmParseError(
        msg(
            "slurm.slurm-answer-cannot-read",
            "Slurm's output cannot be parsed: %(error)s. Tell the administrator of this site.",
            error=what,
        ),
        detail=shown,
    )


def split_rows(text: str, separator: str, columns: int) -> Iterator[list[str]]:
    """Split the output into rows of `columns` fields. Each field ends with `separator`, each row with a newline.

    Fields may contain any other text, also newlines. A truncated row or a wrong number of fields raises
    SlurmParseError; no row is dropped silently.
    """
    parts = text.split(separator)
    tail = parts.pop()
    if text and tail != "\n":
        raise parse_error("the last row is not complete", tail or text[-200:])
    if len(parts) % columns:
        start = len(parts) - len(parts) % columns
        raise parse_error("the last row is not complete", "|".join(parts[start:]))
    for start in range(0, len(parts), columns):
        row = parts[start : start + columns]
        if start:
            if not row[0].startswith("\n"):
                raise parse_error(f"a row does not have {columns} fields", "|".join(row))
            row[0] = row[0][1:]
        yield row


def split_raw_rows(text: str, separator: str, columns: int) -> list[str] | None:
    """The rows of `split_rows`, each as one string with FIELD_SEPARATOR between the fields, to be used as cache key.

    None if a field contains FIELD_SEPARATOR or the output is truncated; then use `split_rows`.
    """
    if text.count(FIELD_SEPARATOR) != text.count(separator):
        return None
    rows = text.replace(separator, FIELD_SEPARATOR).split(f"{FIELD_SEPARATOR}\n")
    if rows.pop() or any(row.count(FIELD_SEPARATOR) != columns - 1 for row in rows):
        return None
    return rows


# -- single values ----------------------------------------------------------------------------------


def has_value(text: str) -> bool:
    return text.strip().upper() not in NO_VALUE


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_time(text: str) -> datetime | None:
    """Parse epoch seconds (SLURM_TIME_FORMAT=%s) or ISO 8601; without a zone the time is in UTC (TZ=UTC)."""
    word = text.strip()
    if not has_value(word) or word == "0":
        return None
    try:
        if word.isdigit():
            return datetime.fromtimestamp(int(word), UTC)
        moment = datetime.fromisoformat(word)
    except (ValueError, OverflowError) as error:
        raise parse_error(f"“{word}” is not a time", text) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?\Z")


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_duration_s(text: str) -> int | None:
    """Parse `1-02:03:04`, `02:03:04`, `03:04` (minutes, seconds) or `5` (minutes). None: no value or unlimited."""
    word = text.strip()
    if not has_value(word) or word.upper() in UNLIMITED:
        return None
    match = _DURATION.match(word)
    if match is None:
        raise parse_error(f"“{word}” is not a duration", text)
    numbers = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:  # D-HH[:MM[:SS]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(numbers) == 1:
        return numbers[0] * 60
    total = 0
    for number in numbers:
        total = total * 60 + number
    return total


def format_duration(seconds: int) -> str:
    """Format as Slurm prints time limits: `7-00:00:00`, `02:30:00`."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def format_minutes(seconds: int) -> str:
    """A time limit for Slurm in whole minutes, rounded up."""
    return str(max(1, -(-seconds // 60)))


_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)i?B?[nc]?\Z", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def parse_mem_mib(text: str) -> int:
    """Parse `16G`, `4000M`, `2.50T`, `2Gn` (per node) or `500Mc` (per CPU). A number without a unit is in MiB."""
    match = _MEMORY.match(text.strip())
    if match is None:
        raise parse_error(f"“{text}” is not an amount of memory", text)
    return round(float(match["number"]) * _MIB[match["unit"].upper()])


def parse_int(text: str) -> int | None:
    if text.isdecimal():  # fast path
        return int(text)
    word = text.strip()
    if not has_value(word) or word.upper() in UNLIMITED:
        return None
    try:
        return int(word)
    except ValueError as error:
        raise parse_error(f"“{word}” is not a number", text) from error


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit code, and the signal that ended the process (0: none)."""

    status: int
    signal: int = 0


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_exit_status(text: str) -> ExitStatus | None:
    """Parse `3:0` of sacct and scontrol: exit code 3, signal 0."""
    word = text.strip()
    if not has_value(word):
        return None
    status, colon, killed_by = word.partition(":")
    if not status.isdigit() or (colon and not killed_by.isdigit()):
        raise parse_error(f"“{word}” is not an exit code", text)
    return ExitStatus(int(status), int(killed_by or 0))


def expand_nodes(text: str) -> tuple[str, ...]:
    """The node names of `n[1-3,7]`, in order."""
    word = text.strip()
    # squeue and sacct print "None assigned" or "(null)" for a job without nodes.
    if not has_value(word) or word.lower() == "none assigned":
        return ()
    try:
        return tuple(NodeSet(word))
    except NodeSetException as error:
        raise parse_error(f"“{word}” is not a node list", text) from error


# -- TRES -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tres:
    """The trackable resources that Sluice uses. Slurm prints `cpu=4,mem=16G,node=1,billing=4,gres/gpu=2,gres/gpu:a100=2`."""

    cpus: int | None = None
    mem_mib: int | None = None
    nodes: int | None = None
    gpus: int | None = None  # of all types together


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_tres(text: str) -> Tres:
    numbers: dict[str, int] = {}
    gpus_by_type: dict[str, int] = {}
    for item in text.strip().split(",") if has_value(text) else ():
        name, equals, value = item.partition("=")
        if not equals:
            raise parse_error(f"“{item}” is not a TRES", text)
        if name == "mem":
            numbers["mem_mib"] = parse_mem_mib(value)
        elif name in ("cpu", "node", "gres/gpu"):
            key = {"cpu": "cpus", "node": "nodes", "gres/gpu": "gpus"}[name]
            numbers[key] = _parse_count(value, text)
        elif name.startswith("gres/gpu:"):
            gpus_by_type[name] = _parse_count(value, text)
    if gpus_by_type:
        numbers.setdefault("gpus", sum(gpus_by_type.values()))
    return Tres(**numbers)


def _parse_count(value: str, text: str) -> int:
    number = parse_int(value)
    if number is None:
        raise parse_error(f"“{value}” is not a number", text)
    return number


# -- key=value (scontrol -o) ------------------------------------------------------------------------

_KEY = re.compile(r"(?:^|(?<= ))([A-Za-z][\w:/()-]*)=")


def parse_pairs(line: str) -> dict[str, str]:
    """Parse one line of `scontrol -o`: `Key=value Key=value with spaces Key=`.

    Values may contain spaces (Reason, Comment, OS) and `=`. scontrol does not escape them, so a ` word=` in free text is
    parsed as a key. If a key occurs more than once, its first value is returned.
    """
    keys = list(_KEY.finditer(line))
    pairs: dict[str, str] = {}
    for position, match in enumerate(keys):
        end = keys[position + 1].start() if position + 1 < len(keys) else len(line)
        pairs.setdefault(match[1], line[match.end() : end].strip())
    return pairs
