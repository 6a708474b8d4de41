"""Files and exit codes of a running attempt: task states and the verdict.

The contract between the scripts (`jobs/script/shell`) that write them and the engine that reads them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

# Sent to the batch script only (scancel --batch). It sends SIGTERM to every task, SIGKILL after the grace
# period, and then cancels the job.
STOP_SIGNAL = "USR2"


class ScriptExit(IntEnum):
    """Exit codes of the scripts themselves. A task may exit with the same number; `reason` distinguishes them."""

    START_FAILED = 200  # the attempt's directory is not usable
    IMAGE_MISSING = 201  # reason image_missing: permanent
    IMAGE_FAILED = 202  # reason image_failed: the image could not be fetched or unpacked
    MOUNT_MISSING = 203  # reason mount_missing: a directory of the job does not exist: permanent
    PORT_TAKEN = 204  # reason port_taken: a fixed port was in use on the node
    TASK_LOST = 205  # reason lost: a step ended without the task's own report
    LAUNCH_FAILED = 206  # reason launch_failed: Slurm created no step, nothing has run: transient
    WORK_DIR_MISSING = 207
    STOPPED = 143  # reason stopped


def render_exit_codes(*codes: ScriptExit) -> str:
    """Assignments for a script: exit_image_missing=201 …"""
    return " ".join(f"exit_{code.name.lower()}={code.value}" for code in codes)


PERMANENT_REASONS = frozenset({"image_missing", "mount_missing"})


@dataclass(frozen=True, slots=True)
class TaskState:
    """One task as task.sh last described it. Empty or None: not known yet."""

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
    log_offset: int = 0  # start of this incarnation's output in the task's log
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
    """The batch script's result for the job, with the rule and task that decided it."""

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
        """True if a retry would fail with the same error."""
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
    """A task's state file. Raises ValueError if it is not complete."""
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
    """The attempt's verdict file. Raises ValueError if it is not complete."""
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
