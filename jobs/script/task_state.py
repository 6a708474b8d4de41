"""Formats of the files and exit codes by which an attempt's scripts report to the engine.

The scripts in `jobs/script/shell` write a state file per task and one result file; the engine reads them. A state is a block
of lines KEY=VALUE between the lines "begin" and "end", which is appended: the last complete block counts. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

# The signal that stops a job; only the batch script gets it (scancel --batch). The batch script then sends
# SIGTERM to every task, SIGKILL after the grace period, and cancels the job.
STOP_SIGNAL = "USR2"
# The owner of an attempt can replace its files. Longer texts for people are cut.
MAX_NAME_LENGTH = 255
MAX_IMAGE_LENGTH = 255
MAX_ERROR_LENGTH = 300


class ScriptExit(IntEnum):
    """Exit codes of batch.sh, task.sh and enter.sh.

    A command of a job may exit with the same number. `TaskState.reason` tells the cases apart: it is empty if the
    number comes from the job's command.
    """

    START_FAILED = 200  # reason start_failed: the attempt's directory cannot be read or written
    IMAGE_MISSING = 201  # reason image_missing: the image does not exist; not retried
    IMAGE_FAILED = 202  # reason image_failed: the image could not be fetched or unpacked
    MOUNT_MISSING = 203  # reason mount_missing: a directory of the job does not exist; not retried
    PORT_TAKEN = 204  # reason port_taken: a fixed port was in use on the node
    TASK_LOST = 205  # reason lost: the step ended, but the task had not reported its end
    LAUNCH_FAILED = 206  # reason launch_failed: Slurm created no step, no task ran; always retried
    WORK_DIR_MISSING = 207  # the task's working directory does not exist in the container
    # reason ssh_failed: SSH between the tasks could not be set up on the node; not retried
    SSH_FAILED = 208
    SERVER_FAILED = (
        209  # the framework's server could not be started in the container of the first task
    )
    CODE_TOO_LARGE = 210  # reason code_too_large: codeDir is larger than the limit; not retried
    CODE_FAILED = 211  # reason code_failed: codeDir could not be copied
    STOPPED = 143  # reason stopped: the task or job was stopped


def render_exit_codes(*codes: ScriptExit) -> str:
    """Render shell assignments of exit codes: exit_image_missing=201 exit_port_taken=204."""
    return " ".join(f"exit_{code.name.lower()}={code.value}" for code in codes)


@dataclass(frozen=True, slots=True)
class TaskState:
    """The content of one task's state file. Values that are not known yet are empty or None."""

    role: str
    index: int
    state: str  # pulling, starting, running, debug, ended
    restart_count: int = 0  # SLURM_RESTART_COUNT: 1 after the first requeue
    host: str = ""
    ip: str = ""
    ports: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gpus: tuple[str, ...] = ()
    step: str = ""
    pid: int | None = None
    log_offset: int = (
        0  # size of the task's log when the task started, in bytes; 0 before any requeue
    )
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    image: str = ""
    pulled_bytes: int | None = None  # state pulling: from the file "pulling" (`ImagePull`)


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """The result file of the batch script: how the job ended, and the rule and task that decided it."""

    outcome: str  # completed, failed, stopped
    rule: str  # all_ended, min_failed, min_succeeded, main_role, start, stop, time_limit
    role: str = ""
    index: int | None = None
    exit_code: int = 0
    reason: str = ""
    image: str = ""  # name of the image of the role
    # Message of the program that failed, such as a registry's answer; code_too_large: the size in MiB.
    error: str = ""
    restart_count: int = 0
    ended: float | None = None

    @property
    def is_permanent(self) -> bool:
        """True if a retry would fail the same way."""
        return self.reason in ("image_missing", "mount_missing", "code_too_large", "ssh_failed")


@dataclass(frozen=True, slots=True)
class ImagePull:
    """The content of the file "pulling", which exists while the batch script fetches an image."""

    role: str
    image: str
    pulled_bytes: int  # of layers and image file; the size of the complete image is not known


def _parse_pairs(text: str) -> dict[str, str]:
    """Parse the lines KEY=VALUE of the last complete block.

    A text without "begin" is one block: scripts before blocks replaced their files by renaming.
    """
    lines = text.split("\n")
    if "begin" in lines:
        complete = lines[: len(lines) - lines[::-1].index("end")] if "end" in lines else []
        lines = complete[len(complete) - complete[::-1].index("begin") :] if complete else []
    return dict(line.partition("=")[::2] for line in lines if "=" in line)


def _clean_text(text: str, limit: int) -> str:
    """Remove control and formatting characters from text that people read, and limit its length."""
    return "".join(c for c in text if c.isprintable())[:limit].strip()


def _parse_int(text: str) -> int | None:
    """Parse a number that fits into a database column; None for anything else."""
    if not text.isascii() or not text.removeprefix("-").isdigit():
        return None
    number = int(text)
    return number if abs(number) < 2**31 else None


def _parse_name(text: str) -> str:
    """Parse a name or address that people see and the database stores: no control characters, NUL in particular."""
    return _clean_text(text, MAX_NAME_LENGTH)


def _parse_seconds(text: str) -> float | None:
    # bash writes EPOCHREALTIME with a decimal comma in some locales.
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None


def _parse_ports(text: str) -> dict[str, tuple[int, ...]]:
    """Parse ports by label from text such as http:2000;data:2001,2002;"""
    ports_by_label = {}
    for entry in filter(None, text.split(";")):
        label, _, numbers = entry.rpartition(":")
        parsed = (_parse_int(n) for n in numbers.split(","))
        ports_by_label[_parse_name(label)] = tuple(n for n in parsed if n is not None and n >= 0)
    return ports_by_label


def parse_task_state(text: str) -> TaskState:
    """Parse a task's state file. Raises ValueError if it is not complete."""
    values = _parse_pairs(text)
    index = _parse_int(values.get("index", ""))
    if not values.get("role") or index is None or not values.get("state"):
        raise ValueError("not a task's state file")
    return TaskState(
        role=values["role"],
        index=index,
        state=_parse_name(values["state"]),
        restart_count=_parse_int(values.get("restart_count", "")) or 0,
        host=_parse_name(values.get("host", "")),
        ip=_parse_name(values.get("ip", "")),
        ports=_parse_ports(values.get("ports", "")),
        gpus=tuple(filter(None, _parse_name(values.get("gpus", "")).split(","))),
        step=_parse_name(values.get("step", "")),
        pid=_parse_int(values.get("pid", "")),
        log_offset=_parse_int(values.get("log_offset", "")) or 0,
        started=_parse_seconds(values.get("started", "")),
        ended=_parse_seconds(values.get("ended", "")),
        exit_code=_parse_int(values.get("exit_code", "")),
        signal=_parse_int(values.get("signal", "")),
        reason=_parse_name(values.get("reason", "")),
        image=_clean_text(values.get("image", ""), MAX_IMAGE_LENGTH),
    )


def parse_image_pull(text: str) -> ImagePull:
    """Parse the file "pulling". Raises ValueError if it is not complete."""
    values = _parse_pairs(text)
    text_of_bytes = values.get("bytes", "")
    pulled_bytes = (
        int(text_of_bytes) if text_of_bytes.isascii() and text_of_bytes.isdigit() else None
    )
    if not values.get("role") or pulled_bytes is None:
        raise ValueError("not a file with the progress of fetching an image")
    image = _clean_text(values.get("image", ""), MAX_IMAGE_LENGTH)
    return ImagePull(values["role"], image, pulled_bytes)


def parse_script_result(text: str) -> ScriptResult:
    """Parse the batch script's result file. Raises ValueError if it is not complete."""
    values = _parse_pairs(text)
    code = _parse_int(values.get("exit_code", ""))
    if values.get("outcome") not in ("completed", "failed", "stopped") or code is None:
        raise ValueError("not a result file of a batch script")
    return ScriptResult(
        outcome=values["outcome"],
        rule=_parse_name(values.get("rule", "")),
        role=_parse_name(values.get("role", "")),
        index=_parse_int(values.get("index", "")),
        exit_code=code,
        reason=_parse_name(values.get("reason", "")),
        image=_clean_text(values.get("image", ""), MAX_IMAGE_LENGTH),
        error=_clean_text(values.get("error", ""), MAX_ERROR_LENGTH),
        restart_count=_parse_int(values.get("restart_count", "")) or 0,
        ended=_parse_seconds(values.get("ended", "")),
    )
