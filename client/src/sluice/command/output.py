"""Output of the command: results on stdout, notes on stderr. With --json, stdout has only JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from sluice.archive import FileProgress
from sluice.command.terminal import filter_sequences, strip_control
from sluice.display import memory_text
from sluice.errors import Forbidden, NotConfigured, SluiceError, Unauthorized, Unreachable
from sluice.messages import t
from sluice.values import Job, Task

EXIT_FAILED, EXIT_USAGE, EXIT_NO_ACCESS, EXIT_DETACHED = 1, 2, 3, 130
STATE_STYLES = {
    "QUEUED": "dim",
    "PENDING": "yellow",
    "RUNNING": "blue",
    "COMPLETED": "green",
    "FAILED": "bold red",
    "STOPPED": "magenta",
}
# JSON allows these unescaped, but a terminal obeys them.
_UNESCAPED_CONTROL = re.compile(r"[\x7f-\x9f]")


@dataclass
class Mode:
    """Output mode of this process. `json` is set by the option --json and also applies to errors."""

    json: bool = False


mode = Mode()


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_message(text: str, style: str = "") -> None:
    """Print a note to stderr."""
    stderr_console().print(Text(strip_control(text), style=style))


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = _UNESCAPED_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_text(text: str) -> None:
    """Print a text result; on a terminal without control sequences."""
    if sys.stdout.isatty():
        text = filter_sequences(text)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def set_json_mode(enabled: bool) -> None:
    mode.json = enabled


def print_result(value: Any, show: Callable[[], None]) -> None:
    if mode.json:
        print_json(value)
    else:
        show()


def print_error(error: SluiceError) -> int:
    """Print the error and return the exit code."""
    if mode.json:
        errors = [
            {"path": e.path, "message": e.message, "code": e.code}
            | ({"file": e.file} if e.file else {})
            for e in error.errors
        ]
        print_json({"error": {"code": error.code, "message": error.message, "errors": errors}})
    else:
        if len(error.errors) > 1:
            # The message has only the first of the errors.
            print_message(t("{count} problems:", count=len(error.errors)), "red")
            # Of several job files, every refusal is listed.
            shown = error.errors if any(e.file for e in error.errors) else error.errors[:20]
            for field in shown:
                print_message(f"  {field}")
        elif error.errors and error.errors[0].file:
            print_message(str(error.errors[0]), "red")
        else:
            print_message(error.message, "red")
        if isinstance(error, Unauthorized) and "sluice login" not in error.message:
            print_message(t("Run: sluice login"))
    if isinstance(error, Forbidden) and error.code in ("token_read_only", "sign_in_needed"):
        return EXIT_NO_ACCESS
    no_access = isinstance(error, Unauthorized | Unreachable | NotConfigured)
    return EXIT_NO_ACCESS if no_access else EXIT_FAILED


# --- tables ---------------------------------------------------------------------------------------


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    grid = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(
            *(cell if isinstance(cell, Text) else Text(strip_control(cell)) for cell in row)
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(grid)


def print_fields(rows: Iterable[tuple[str, object]]) -> None:
    print_table(
        ("", ""), ((Text(name, style="bold"), value) for name, value in rows if value != "")
    )


def state_text(job: Job) -> Text:
    text = job.state + (f" ({t('stopping')})" if job.stopping else "")
    return Text(text, style=STATE_STYLES.get(job.state, ""))


def task_state_text(task: Task) -> str:
    """Return the label of a task's state. A state that this client does not know is returned unchanged."""
    labels = {
        "waiting": t("waiting"),
        "pulling": t("pulling the image"),
        "running": t("running"),
        "kept": t("failed, kept"),
        "succeeded": t("succeeded"),
        "failed": t("failed"),
        "stopped": t("stopped"),
        "unknown": t("result unknown"),
    }
    text = labels.get(task.state, task.state)
    if task.state == "pulling" and task.pulled_bytes is not None:
        text += f", {size_text(task.pulled_bytes)}"
    return text


def duration_text(seconds: int | None) -> str:
    if seconds is None:
        return ""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h" if hours else f"{days}d"
    if hours:
        return f"{hours}h {minutes}m" if minutes else f"{hours}h"
    if minutes:
        return f"{minutes}m {seconds}s" if seconds else f"{minutes}m"
    return f"{seconds}s"


def age_text(at: datetime | None) -> str:
    return "" if at is None else duration_text(int((datetime.now(UTC) - at).total_seconds()))


def timestamp_text(at: datetime | None) -> str:
    return "" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size_text(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def resources_text(job: Job) -> str:
    text = f"{job.cpus} CPU, {memory_text(job.mem_mib)}"
    return text + (f", {job.gpus} GPU {job.gpu_type}".rstrip() if job.gpus else "")


# --- progress -------------------------------------------------------------------------------------


@contextmanager
def progress_bar(title: str) -> Iterator[FileProgress | None]:
    """Show a progress bar and yield the function that updates it; yield None if stderr is not a terminal."""
    if mode.json or not sys.stderr.isatty():
        yield None
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=stderr_console(),
        transient=True,
    ) as progress:
        bars: dict[str, Any] = {}

        def update(name: str, done: int, total: int) -> None:
            if name not in bars:
                label = strip_control(f"{title} {name}".strip())
                bars[name] = progress.add_task(label, total=total or None)
            progress.update(bars[name], completed=done, total=total or None)
            if total and done >= total and name:
                progress.remove_task(bars.pop(name))

        yield update
