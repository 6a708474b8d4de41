"""How Slurm writes things down: times, durations, memory, TRES, node lists, rows; and how argv begin.

Every parser of the package reads its fields with these, so that "N/A", `1-02:03:04`, `2Gn` and a row that
was cut off are understood, or refused, in one place. Pure.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from ClusterShell.NodeSet import NodeSet, NodeSetException

from clusters.errors import SlurmParseError
from clusters.slurm.reasons import ExitStatus
from core.messages import _

NO_VALUE = frozenset({"", "N/A", "NONE", "UNKNOWN", "(NULL)", "NOT_SET", "INVALID", "NULL"})
# A pass reads thousands of rows whose times, limits and resources repeat: reading each text once halves its time.
PARSE_CACHE_SIZE = 8192
UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "PARTITION_LIMIT"})

# Settings in a login's environment which filter or reshape an answer. SQUEUE_FORMAT2 beside -o is even an error.
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
    """Where a site keeps Slurm's programs and configuration; every argv begins here."""

    bin_dir: str = ""  # "": found by PATH
    slurm_conf: str = ""  # "": Slurm's own way of finding it

    def program(self, name: str) -> str:
        return f"{self.bin_dir.rstrip('/')}/{name}" if self.bin_dir else name

    def query_argv(self, name: str, *arguments: str) -> list[str]:
        """A command that reads: times as epoch seconds, whatever the time zone and habits of the login.

        TZ is the second line of defence: where a time is printed without SLURM_TIME_FORMAT, or is given
        to the command (sacct -S), it is UTC.
        """
        unset = [part for variable in _FILTER_VARIABLES for part in ("-u", variable)]
        settings = ["TZ=UTC", "SLURM_TIME_FORMAT=%s", *self._conf_env()]
        return ["env", *unset, *settings, self.program(name), *arguments]

    def action_argv(self, name: str, *arguments: str) -> list[str]:
        """A command that changes something. sbatch hands its environment to the job: nothing is added."""
        conf = self._conf_env()
        return [*(["env", *conf] if conf else []), self.program(name), *arguments]

    def _conf_env(self) -> list[str]:
        return [f"SLURM_CONF={self.slurm_conf}"] if self.slurm_conf else []


# -- rows -------------------------------------------------------------------------------------------


# How every separator begins.
FIELD_SEPARATOR = "\x1f"


def new_separator() -> str:
    """A field separator that no job name or working directory can hold: it is new for each command.

    Names and directories are other people's text, newlines and control characters included: with a
    fixed separator a job name could forge a row.
    """
    return f"{FIELD_SEPARATOR}{secrets.token_hex(4)}"


def parse_error(what: str, row: str) -> SlurmParseError:
    shown = row if len(row) <= 500 else f"{row[:500]}… ({len(row)} characters)"
    return SlurmParseError(
        _(
            "Slurm's answer cannot be read: %(what)s. Tell the administrator of this site.",
            what=what,
        ),
        detail=shown,
    )


def split_rows(text: str, separator: str, columns: int) -> Iterator[list[str]]:
    """Rows of `columns` fields, each field followed by `separator`, each row by a newline.

    Fields may hold anything else, newlines too. What is cut off or has a field too many is an error
    with the row in it, never a row less.
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
    """The same rows, each as one string with FIELD_END between its fields, for those who know rows by heart.

    None: somebody's text looks like a part of the table, or the table is not whole; `split_rows` can tell.
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
    """Epoch seconds (SLURM_TIME_FORMAT=%s), or ISO without a zone, which is UTC because of TZ=UTC."""
    word = text.strip()
    if not has_value(word) or word == "0":
        return None
    try:
        if word.isdigit():
            return datetime.fromtimestamp(int(word), UTC)
        moment = datetime.fromisoformat(word)
    except (ValueError, OverflowError) as error:
        raise parse_error(f"“{word}” is no time", text) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?\Z")


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_duration_s(text: str) -> int | None:
    """`1-02:03:04`, `02:03:04`, `03:04` (minutes and seconds), `5` (minutes); None: none or no limit."""
    word = text.strip()
    if not has_value(word) or word.upper() in UNLIMITED:
        return None
    match = _DURATION.match(word)
    if match is None:
        raise parse_error(f"“{word}” is no duration", text)
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


def format_minutes(seconds: int) -> str:
    """A time limit as Slurm takes it, in whole minutes; never less than was asked for."""
    return str(max(1, -(-seconds // 60)))


_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMGTP]?)i?B?[nc]?\Z", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2, "P": 1024**3}


def parse_mem_mib(text: str) -> int:
    """`16G`, `4000M`, `2.50T`, `2Gn` (per node), `500Mc` (per CPU); without a unit: MiB."""
    match = _MEMORY.match(text.strip())
    if match is None:
        raise parse_error(f"“{text}” is no amount of memory", text)
    return round(float(match["number"]) * _MIB[match["unit"].upper()])


def parse_mem_bytes(text: str) -> int | None:
    """What was used (sacct, sstat: `MaxRSS`): a bare number is bytes, as with --noconvert-free output."""
    word = text.strip()
    if not has_value(word):
        return None
    match = _MEMORY.match(word)
    if match is None:
        raise parse_error(f"“{word}” is no amount of memory", text)
    unit = match["unit"].upper()
    return round(float(match["number"]) * (_MIB[unit] * 1024**2 if unit else 1))


def parse_int(text: str) -> int | None:
    if text.isdecimal():  # nearly always
        return int(text)
    word = text.strip()
    if not has_value(word) or word.upper() in UNLIMITED:
        return None
    try:
        return int(word)
    except ValueError as error:
        raise parse_error(f"“{word}” is no number", text) from error


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_exit_status(text: str) -> ExitStatus | None:
    """sacct's and scontrol's `3:0`: status and signal."""
    word = text.strip()
    if not has_value(word):
        return None
    status, colon, killed_by = word.partition(":")
    if not status.isdigit() or (colon and not killed_by.isdigit()):
        raise parse_error(f"“{word}” is no exit code", text)
    return ExitStatus(int(status), int(killed_by or 0))


def expand_nodes(text: str) -> tuple[str, ...]:
    """`n[1-3,7]` → names in order; ClusterShell knows the grammar."""
    word = text.strip()
    # squeue and sacct say "None assigned" or "(null)" for a job without nodes.
    if not has_value(word) or word.lower() == "none assigned":
        return ()
    try:
        return tuple(NodeSet(word))
    except NodeSetException as error:
        raise parse_error(f"“{word}” is no node list", text) from error


def fold_nodes(names: Sequence[str]) -> str:
    return str(NodeSet.fromlist(list(names)))


# -- TRES -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tres:
    """`cpu=4,mem=16G,node=1,billing=4,gres/gpu=2,gres/gpu:a100=2`."""

    cpus: int | None = None
    mem_mib: int | None = None
    nodes: int | None = None
    gpus: int | None = None  # of any type
    gpus_by_type: Mapping[str, int] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)  # billing, licenses, energy, …

    def __bool__(self) -> bool:
        return self != Tres()


@lru_cache(maxsize=PARSE_CACHE_SIZE)
def parse_tres(text: str) -> Tres:
    numbers: dict[str, int] = {}
    by_type: dict[str, int] = {}
    other: dict[str, str] = {}
    for item in text.strip().split(",") if has_value(text) else ():
        name, equals, value = item.partition("=")
        if not equals:
            raise parse_error(f"“{item}” is no TRES", text)
        if name == "mem":
            numbers["mem_mib"] = parse_mem_mib(value)
        elif name in ("cpu", "node", "gres/gpu"):
            key = {"cpu": "cpus", "node": "nodes", "gres/gpu": "gpus"}[name]
            numbers[key] = _parse_count(value, text)
        elif name.startswith("gres/gpu:"):
            by_type[name.removeprefix("gres/gpu:")] = _parse_count(value, text)
        else:
            other[name] = value
    if by_type and "gpus" not in numbers:
        numbers["gpus"] = sum(by_type.values())
    return Tres(**numbers, gpus_by_type=by_type, other=other)


def _parse_count(value: str, text: str) -> int:
    number = parse_int(value)
    if number is None:
        raise parse_error(f"“{value}” is no number", text)
    return number


# -- key=value (scontrol -o) ------------------------------------------------------------------------

_KEY = re.compile(r"(?:^|(?<= ))([A-Za-z][\w:/()-]*)=")


def parse_pairs(line: str) -> dict[str, str]:
    """One line of `scontrol -o`: `Key=value Key=value with blanks Key=`.

    Values may hold blanks (Reason, Comment, OS) and even `x=y`: a key begins after a blank, so free text of the
    form ` word=` cannot be told from a key. Only names that Slurm prints once are to be trusted, and of
    a name that comes twice the first is kept.
    """
    keys = list(_KEY.finditer(line))
    pairs: dict[str, str] = {}
    for position, match in enumerate(keys):
        end = keys[position + 1].start() if position + 1 < len(keys) else len(line)
        pairs.setdefault(match[1], line[match.end() : end].strip())
    return pairs
