"""Commands for the results of a job: logs, metrics, files."""

from __future__ import annotations

import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sluice.archive import FileProgress, bind_file_name
from sluice.client import Client
from sluice.command import metrics, output
from sluice.command.attach import Printer, attach_and_exit
from sluice.command.options import (
    AllOption,
    AttemptOption,
    IndexOption,
    JobArgument,
    JsonOption,
    RoleOption,
)
from sluice.errors import Invalid, NotFound
from sluice.logs import LogStream
from sluice.messages import t
from sluice.values import Job

FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help=t("Follow until the task has ended."))
]
MetricsOption = Annotated[
    bool, typer.Option("--metrics", help=t("Only the numbers matched by the job file's metrics."))
]


def register(app: typer.Typer) -> None:
    app.command("logs", help=t("The output of a task, byte for byte."))(logs)
    app.command(
        "loglines", help=t("The output of a task by lines, each with task and line number.")
    )(loglines)
    app.command("emetrics", help=t("Numbers in the output, matched by the job file's metrics."))(
        emetrics
    )
    app.command("files", help=t("The files of a job on the cluster."))(files)
    app.command("download", help=t("Download a job's code or results."))(download)


def open_log_stream(
    client: Client, job: Job, role: str, index: int, follow: bool, attempt: int | None
) -> LogStream:
    def print_reason(reason: str) -> None:
        output.print_message(reason, "dim")

    return client.logs(job, role, index, follow=follow, attempt=attempt, on_wait=print_reason)


def exit_on_interrupt(follow_log: Callable[[], None]) -> None:
    """Call `follow_log`. Ctrl-C ends it with the exit code of a detached command."""
    try:
        follow_log()
    except KeyboardInterrupt:
        raise typer.Exit(output.EXIT_DETACHED) from None


def logs(
    id: JobArgument,
    follow: FollowOption = False,
    only_metrics: MetricsOption = False,
    role: RoleOption = "",
    index: IndexOption = 0,
    all_tasks: AllOption = False,
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job = client.find(id)
        if only_metrics:
            exit_on_interrupt(lambda: show_metrics(client, job, role, index, follow, attempt))
        elif all_tasks and follow:
            attach_and_exit(client, job, all_tasks=True)
        elif all_tasks:
            print_all_logs(client, job, attempt)
        else:
            stream = open_log_stream(client, job, role, index, follow, attempt)
            printer = Printer()

            def follow_log() -> None:
                for chunk in stream:
                    printer.write(stream.role, index, chunk)
                printer.finish(stream.role, index)

            exit_on_interrupt(follow_log)


def print_all_logs(client: Client, job: Job, attempt: int | None) -> None:
    printer = Printer(prefix_lines=True)
    for row in client.log_list(job, attempt=attempt):
        key = (str(row["role"]), int(row["index"]))
        if row.get("size"):
            for chunk in LogStream(client.session, job.id, *key, attempt=attempt):
                printer.write(*key, chunk)
            printer.finish(*key)


def loglines(
    id: JobArgument,
    follow: FollowOption = False,
    only_metrics: MetricsOption = False,
    role: RoleOption = "",
    index: IndexOption = 0,
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job = client.find(id)
        if only_metrics:
            exit_on_interrupt(lambda: show_metrics(client, job, role, index, follow, attempt))
            return
        stream = open_log_stream(client, job, role, index, follow, attempt)

        def follow_log() -> None:
            for number, line in enumerate(stream.lines(), start=1):
                if output.mode.json:
                    position = {"role": stream.role, "index": index, "line": number}
                    output.print_json({**position, "text": line})
                else:
                    output.print_text(f"{stream.role}-{index} {number:>6}  {line}")

        exit_on_interrupt(follow_log)


def emetrics(
    id: JobArgument,
    follow: FollowOption = False,
    # Has no effect. Accepted because the command of the same name of an older client has this option.
    only_metrics: MetricsOption = False,
    role: RoleOption = "",
    index: IndexOption = 0,
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job = client.find(id)
        exit_on_interrupt(lambda: show_metrics(client, job, role, index, follow, attempt))


def show_metrics(
    client: Client, job: Job, role: str, index: int, follow: bool, attempt: int | None
) -> None:
    groups = metrics.parse_metric_groups(client.spec(job))
    stream = open_log_stream(client, job, role, index, follow, attempt)
    for row in metrics.extract_metrics(stream.lines(), groups):
        if output.mode.json:
            output.print_json({"role": stream.role, "index": index, **row})
        else:
            pairs = {**row["meta"], **row["values"]}
            text = "  ".join(f"{name}={value}" for name, value in pairs.items())
            output.print_text(f"{row['group']}  {output.strip_control(text)}")


RootOption = Annotated[
    str,
    typer.Option(
        "--root", help=t("work: the attempt's directory; output: results; model: models.")
    ),
]


def files(
    id: JobArgument,
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help=t("A directory below the root."))
    ] = "",
    root: RootOption = "work",
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        entries = client.files(client.find(id), path, root=root, attempt=attempt)
    output.print_result(
        [file.raw for file in entries],
        lambda: output.print_table(
            (t("NAME"), t("SIZE"), t("CHANGED")),
            (
                (
                    file.name + ("/" if file.kind == "dir" else ""),
                    "" if file.kind == "dir" else output.size_text(file.size),
                    output.timestamp_text(file.modified_at),
                )
                for file in entries
            ),
        ),
    )


def download(
    id: JobArgument,
    definition: Annotated[
        bool, typer.Option("--definition", help=t("The code and the job file."))
    ] = False,
    trainedmodel: Annotated[
        bool, typer.Option("--trainedmodel", help=t("The results (the default)."))
    ] = False,
    filename: Annotated[
        str,
        typer.Option(
            "--filename", help=t("Target: a directory, or a file name ending in .zip or .tar.")
        ),
    ] = "",
    path: Annotated[
        str, typer.Option("--path", help=t("Only this file or directory below the root."))
    ] = "",
    root: RootOption = "",
    attempt: AttemptOption = None,
    json: JsonOption = False,
) -> None:
    if definition and trainedmodel:
        raise Invalid(t("Give --definition or --trainedmodel, not both."), code="usage")
    with Client() as client:
        job = client.find(id)
        kind = "definition" if definition else "results"
        root = root or ("work" if definition else "output")
        target = Path(filename or f"{safe_filename(job.name)}-{job.id[:8]}-{kind}")
        with output.progress_bar(t("Downloading")) as update:
            if definition and not path:
                paths = fetch_definition(client, job, target, attempt, update)
            elif target.suffix == ".tar":
                paths = [client.download_tar(job, target, path, root=root, attempt=attempt)]
            elif target.suffix == ".zip":
                paths = fetch_zip(client, job, target, path, root, attempt, update)
            else:
                paths = fetch(client, job, target, path, root, attempt, update)
    if not paths:
        output.print_message(
            t("Nothing to download: the directory is empty. Other files of the job: --root work."),
            "yellow",
        )
    output.print_result(
        {"target": str(target), "files": [str(file) for file in paths]},
        lambda: output.print_message(
            t("Files in {target}: {count}.", count=len(paths), target=str(target))
        ),
    )


def fetch(
    client: Client,
    job: Job,
    target: Path,
    path: str,
    root: str,
    attempt: int | None,
    update: FileProgress | None,
) -> list[Path]:
    """Download a single file, or a directory recursively."""
    if path:
        parent, _, name = path.strip("/").rpartition("/")
        files_in_parent = client.files(job, parent, root=root, attempt=attempt)
        entries = {entry.name: entry for entry in files_in_parent}
        if name not in entries:
            raise NotFound(t("The job has no file {path}.", path=path), code="file_missing")
        if entries[name].kind != "dir":
            progress = bind_file_name(update, name)
            return [
                client.download(job, path, target, root=root, attempt=attempt, progress=progress)
            ]
    return list(
        client.download_tree(job, target, path, root=root, attempt=attempt, progress=update)
    )


def fetch_definition(
    client: Client, job: Job, target: Path, attempt: int | None, update: FileProgress | None
) -> list[Path]:
    """Download the job file, and the code if it was uploaded."""
    if target.suffix == ".tar":
        return [client.download_tar(job, target, "code", root="work", attempt=attempt)]
    with tempfile.TemporaryDirectory(prefix="sluice-") as temporary:
        directory = Path(temporary) if target.suffix == ".zip" else target
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "job.yaml").write_text(client.job_file(job), encoding="utf-8")
        paths = [directory / "job.yaml"]
        try:
            paths += client.download_tree(
                job, directory / "code", "code", root="work", attempt=attempt, progress=update
            )
        except NotFound:
            (directory / "code").rmdir()
            output.print_message(
                t("No code was uploaded with this job; only the job file is available.")
            )
        return write_zip(directory, target, paths) if target.suffix == ".zip" else paths


def fetch_zip(
    client: Client,
    job: Job,
    target: Path,
    path: str,
    root: str,
    attempt: int | None,
    update: FileProgress | None,
) -> list[Path]:
    with tempfile.TemporaryDirectory(prefix="sluice-") as temporary:
        directory = Path(temporary)
        paths = client.download_tree(
            job, directory, path, root=root, attempt=attempt, progress=update
        )
        return write_zip(directory, target, list(paths))


def write_zip(directory: Path, target: Path, paths: list[Path]) -> list[Path]:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in paths:
            archive.write(file, file.relative_to(directory).as_posix())
    return [target]


def safe_filename(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name).lstrip(".") or "job"
