"""What a running attempt writes about itself, read back: task state files, the verdict, exit codes.

The contract between the rendered scripts (`jobs.script.render`, `jobs/shell`) and the engine. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

# To the batch script alone (scancel --batch): SIGTERM to every task, SIGKILL after the grace, then cancel the job.
STOP_SIGNAL = "USR2"


class ScriptExit(IntEnum):
    """Exit codes that the scripts themselves give. A task may use the same numbers: `reason` decides."""

    START_FAILED = 200  # the attempt's own directory is not usable
    IMAGE_MISSING = 201  # reason image_missing: permanent
    IMAGE_FAILED = 202  # reason image_failed: the registry could not be reached, or the like
    MOUNT_MISSING = 203  # reason mount_missing: a directory of the job is not there: permanent
    PORT_TAKEN = 204  # reason port_taken: a fixed port was in use on the node
    TASK_LOST = 205  # reason lost: a step ended without the task's own report
    LAUNCH_FAILED = 206  # reason launch_failed: Slurm gave no step, so nothing has run: transient
    WORK_DIR_MISSING = 207
    STOPPED = 143  # reason stopped


PERMANENT_REASONS = frozenset({"image_missing", "mount_missing"})


@dataclass(frozen=True, slots=True)
class TaskState:
    """One task as its wrapper last described it. Empty or None: not known (yet)."""

    role: str
    index: int
    state: str  # pulling, starting, running, debug, ended
    incarnation: int = 0  # Slurm's restart count: 1 after the first requeue
    host: str = ""
    ip: str = ""
    ports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    step: str = ""
    pid: int | None = None
    log_offset: int = 0  # where this incarnation's output begins in the task's log
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    image: str = ""

    @property
    def succeeded(self) -> bool:
        return self.state == "ended" and self.exit_code == 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the batch script judged the job, and which rule and task decided."""

    verdict: str  # completed, failed, stopped
    rule: str  # all_ended, min_failed, min_succeeded, main_role, start, stop, time_limit
    role: str = ""
    index: int | None = None
    exit_code: int = 0
    reason: str = ""
    incarnation: int = 0
    ended: float | None = None

    @property
    def permanent(self) -> bool:
        """Whether trying again cannot help."""
        return self.reason in PERMANENT_REASONS


def _parse_pairs(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def _parse_int(text: str) -> int | None:
    return int(text) if text.isascii() and text.removeprefix("-").isdigit() else None


def _parse_seconds(text: str) -> float | None:
    # EPOCHREALTIME has a comma in some locales.
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None


def _parse_ports(text: str) -> dict[str, tuple[int, ...]]:
    ports_by_label = {}
    for entry in filter(None, text.split(";")):
        label, _, numbers = entry.rpartition(":")
        ports_by_label[label] = tuple(int(n) for n in numbers.split(",") if n.isdigit())
    return ports_by_label


def parse_task_state(text: str) -> TaskState:
    """A task's state file. Raises ValueError when it is none: never guesses."""
    values = _parse_pairs(text)
    index = _parse_int(values.get("index", ""))
    if not values.get("role") or index is None or not values.get("state"):
        raise ValueError("not a task's state file")
    return TaskState(
        role=values["role"],
        index=index,
        state=values["state"],
        incarnation=_parse_int(values.get("incarnation", "")) or 0,
        host=values.get("host", ""),
        ip=values.get("ip", ""),
        ports=_parse_ports(values.get("ports", "")),
        gpus=tuple(filter(None, values.get("gpus", "").split(","))),
        step=values.get("step", ""),
        pid=_parse_int(values.get("pid", "")),
        log_offset=_parse_int(values.get("log_offset", "")) or 0,
        started=_parse_seconds(values.get("started", "")),
        ended=_parse_seconds(values.get("ended", "")),
        exit_code=_parse_int(values.get("exit_code", "")),
        signal=_parse_int(values.get("signal", "")),
        reason=values.get("reason", ""),
        image=values.get("image", ""),
    )


def parse_verdict(text: str) -> Verdict:
    """The attempt's verdict file. Raises ValueError when it is none."""
    values = _parse_pairs(text)
    code = _parse_int(values.get("exit_code", ""))
    if values.get("verdict") not in ("completed", "failed", "stopped") or code is None:
        raise ValueError("not a verdict file")
    return Verdict(
        verdict=values["verdict"],
        rule=values.get("rule", ""),
        role=values.get("role", ""),
        index=_parse_int(values.get("index", "")),
        exit_code=code,
        reason=values.get("reason", ""),
        incarnation=_parse_int(values.get("incarnation", "")) or 0,
        ended=_parse_seconds(values.get("ended", "")),
    )
