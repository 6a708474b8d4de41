"""Options that commands share, and the client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sluice.client import Client
from sluice.command import output
from sluice.errors import SluiceError
from sluice.messages import t


def complete_jobs(incomplete: str) -> list[tuple[str, str]]:
    """Shell completion: the newest jobs; empty if the server cannot be reached."""
    try:
        with Client() as client:
            rows = [(job.id, f"{job.name} {job.state}") for job in client.list(limit=50)]
    except (SluiceError, OSError):
        return []
    return [row for row in rows if row[0].startswith(incomplete)]


JsonOption = Annotated[
    bool, typer.Option("--json", help=t("Answer in JSON on stdout."), callback=output.set_json_mode)
]
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help=t("The job's id, its beginning, its Slurm id or its name."),
        autocompletion=complete_jobs,
    ),
]
JobArguments = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help=t("The jobs."), autocompletion=complete_jobs),
]
ManifestArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MANIFEST",
        help=t(
            "The job file: JSON or YAML, in any format that Sluice knows; - reads it from stdin."
        ),
    ),
]
CodeArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[ZIP|DIR]", help=t("The code: a directory, or a zip, tar or tar.gz.")),
]
NameOption = Annotated[str, typer.Option("--name", help=t("Instead of the job file's name."))]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", "-n", help=t("Instead of the job file's namespace."))
]
SecretOption = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME[=VALUE]",
        help=t("A secret of the job; without a value it is taken from the environment."),
    ),
]
RoleOption = Annotated[
    str, typer.Option("--role", "-r", help=t("Whose output; else the main role."))
]
IndexOption = Annotated[
    int, typer.Option("--index", "-i", min=0, help=t("Which task of the role."))
]
AllOption = Annotated[
    bool, typer.Option("--all", "-a", help=t("Every task's output, each line with its task."))
]
AttemptOption = Annotated[
    int | None, typer.Option("--attempt", min=1, help=t("Which attempt; else the newest."))
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help=t("Do not ask."))]
