"""Commands for the results of a job: logs, metrics, files."""

from __future__ import annotations

import shutil
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
from sluice.command.terminal import strip_control
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
OTHER_ARCHIVE_SUFFIXES = (".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")


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
            output.print_text(f"{row['group']}  {strip_control(text)}")


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
            "--filename",
            help=t(
                "File to write, a zip archive unless it ends in .tar; default: ID-trainedmodel.zip."
            ),
        ),
    ] = "",
    directory: Annotated[
        bool, typer.Option("--directory", help=t("Write a directory of files, not an archive."))
    ] = False,
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
        root = root or ("work" if definition else "output")
        name = f"{job.id}-definition" if definition else f"{job.id}-trainedmodel"
        target = choose_target(filename, name, directory)
        with output.progress_bar(t("Downloading")) as update:
            if definition and not path:
                paths = fetch_definition(client, job, target, directory, attempt, update)
            elif path and is_single_file(client, job, path, root, attempt):
                target = Path(filename or path.rsplit("/", 1)[-1])
                paths = [fetch_file(client, job, target, path, root, attempt, update)]
            elif directory:
                paths = list(
                    client.download_tree(
                        job, target, path, root=root, attempt=attempt, progress=update
                    )
                )
            elif target.suffix == ".tar":
                paths = [client.download_tar(job, target, path, root=root, attempt=attempt)]
            else:
                paths = fetch_zip(client, job, target, path, root, attempt, update)
    if not paths:
        output.print_message(
            t("Nothing to download: the directory is empty. Other files of the job: --root work."),
            "yellow",
        )
    output.print_result(
        {"target": str(target), "files": [str(file) for file in paths]},
        lambda: output.print_message(
            t("Files in {target}: {count}.", count=len(paths), target=str(target))
            if directory or not paths
            else t("Downloaded to {target}.", target=str(target))
        ),
    )


def choose_target(filename: str, name: str, directory: bool) -> Path:
    """Return the path to write. Raises Invalid for a name of an archive that is neither zip nor tar."""
    if filename.endswith(OTHER_ARCHIVE_SUFFIXES) and not directory:
        raise Invalid(
            t("{name} is not possible: give a name that ends in .zip or .tar.", name=filename),
            code="usage",
        )
    if directory:
        return Path(filename or name)
    target = Path(filename or f"{name}.zip")
    return target / f"{name}.zip" if target.is_dir() else target


def is_single_file(client: Client, job: Job, path: str, root: str, attempt: int | None) -> bool:
    """Whether the path is a file and not a directory. Raises NotFound."""
    parent, _, name = path.strip("/").rpartition("/")
    for entry in client.files(job, parent, root=root, attempt=attempt):
        if entry.name == name:
            return entry.kind != "dir"
    raise NotFound(t("The job has no file {path}.", path=path), code="file_missing")


def fetch_file(
    client: Client,
    job: Job,
    target: Path,
    path: str,
    root: str,
    attempt: int | None,
    update: FileProgress | None,
) -> Path:
    progress = bind_file_name(update, target.name)
    return client.download(job, path, target, root=root, attempt=attempt, progress=progress)


def fetch_definition(
    client: Client,
    job: Job,
    target: Path,
    as_directory: bool,
    attempt: int | None,
    update: FileProgress | None,
) -> list[Path]:
    """Download the job file, and the code if it was uploaded."""
    if target.suffix == ".tar" and not as_directory:
        return [client.download_tar(job, target, "code", root="work", attempt=attempt)]
    with tempfile.TemporaryDirectory(prefix="sluice-") as temporary:
        directory = target if as_directory else Path(temporary)
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
        return paths if as_directory else write_zip(directory, target, paths)


def fetch_zip(
    client: Client,
    job: Job,
    target: Path,
    path: str,
    root: str,
    attempt: int | None,
    update: FileProgress | None,
) -> list[Path]:
    """Download a directory as a zip archive. The files are first collected in NAME.files, so that the same command
    continues an interrupted download."""
    directory = target.with_name(target.name + ".files")
    paths = client.download_tree(job, directory, path, root=root, attempt=attempt, progress=update)
    written = write_zip(directory, target, list(paths)) if paths else []
    shutil.rmtree(directory)
    return written


def write_zip(directory: Path, target: Path, paths: list[Path]) -> list[Path]:
    part = target.with_name(target.name + ".part")
    # Files with a time before 1980, which zip cannot store, get that year.
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for file in paths:
            archive.write(file, file.relative_to(directory).as_posix())
    part.replace(target)
    return [target]
