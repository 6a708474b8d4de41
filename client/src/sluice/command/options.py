"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.client import Client
from sluice.command import output
from sluice.errors import SluiceError
from sluice.messages import t


def complete_jobs(incomplete: str) -> list[tuple[str, str]]:
    """Return the newest jobs for shell completion; none if the server cannot be reached."""
    try:
        with Client() as client:
            rows = [(job.id, f"{job.name} {job.state}") for job in client.list(limit=50)]
    except (SluiceError, OSError):
        return []
    return [row for row in rows if row[0].startswith(incomplete)]


JsonOption = Annotated[
    bool, typer.Option("--json", help=t("Print JSON on stdout."), callback=output.set_json_mode)
]
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help=t("The job's id, the beginning of its id, its Slurm id or its name."),
        autocompletion=complete_jobs,
    ),
]
JobArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="ID", help=t("The jobs: ids, Slurm ids or names."), autocompletion=complete_jobs
    ),
]
ManifestArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MANIFEST",
        help=t("The job file: JSON or YAML, in any supported format; - reads it from stdin."),
    ),
]
ManifestArguments = Annotated[
    list[Path],
    typer.Argument(
        metavar="MANIFEST... [ZIP|DIR]",
        help=t(
            "Job files, in any supported format; - reads from stdin. A file may contain several YAML documents. "
            "Last, the code: a directory, or a zip, tar or tar.gz."
        ),
    ),
]
CodeArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[ZIP|DIR]", help=t("The code: a directory, or a zip, tar or tar.gz.")),
]
NameOption = Annotated[str, typer.Option("--name", help=t("Instead of the job file's name."))]
UniqueNameOption = Annotated[
    bool,
    typer.Option(
        "--unique-name", help=t("Append a number to a name that a job of yours has already.")
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", help=t("Instead of the job file's namespace."))
]
SecretOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME[=VALUE]",
        help=t("A secret of the job; without a value it is read from the environment."),
    ),
]
FollowJobOption = Annotated[
    bool, typer.Option("--follow", "-f", help=t("Follow the job until it ends."))
]
RoleOption = Annotated[
    str, typer.Option("--role", "-r", help=t("Role to show the output of; default: the main role."))
]
IndexOption = Annotated[
    int, typer.Option("--index", "-i", min=0, help=t("Index of the task in the role."))
]
AllOption = Annotated[
    bool,
    typer.Option("--all", "-a", help=t("Output of all tasks; each line starts with its task.")),
]
AttemptOption = Annotated[
    int | None,
    typer.Option("--attempt", min=1, help=t("Number of the attempt; default: the newest.")),
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help=t("Do not ask for confirmation."))]
