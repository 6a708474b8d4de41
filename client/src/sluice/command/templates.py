"""`sluice template …`: commands for templates, which are saved job files with parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from sluice.archive import bind_file_name
from sluice.client import Client
from sluice.command import output
from sluice.command.jobs import parse_secrets, print_and_follow, print_warnings
from sluice.command.options import (
    FollowJobOption,
    JsonOption,
    NameOption,
    NamespaceOption,
    SecretOption,
)
from sluice.command.terminal import strip_control
from sluice.errors import Invalid
from sluice.messages import t
from sluice.values import Template

TemplateArgument = Annotated[
    str, typer.Argument(metavar="TEMPLATE", help=t("The template's id or name."))
]


def make_app() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True, help=t("Manage templates: saved job files with parameters.")
    )
    app.command("list", help=t("Templates that you may use."))(list_templates)
    app.command("show", help=t("One template with its parameters and its job file."))(show)
    app.command("create", help=t("Create a template from a job file or from a job."))(create)
    app.command("submit", help=t("Submit a job from a template."))(submit)
    app.command("delete", help=t("Delete a template; jobs created from it remain."))(delete)
    return app


def list_templates(
    query: Annotated[
        str, typer.Argument(metavar="[TEXT]", help=t("Part of a name, description, owner or id."))
    ] = "",
    mine: Annotated[bool, typer.Option("--mine", "-m", help=t("Only your own."))] = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        result = list(client.templates.list(q=query, mine=mine))
    output.print_result(
        [template.raw for template in result],
        lambda: output.print_table(
            (t("ID"), t("NAME"), t("OWNER"), t("VISIBILITY"), t("PARAMETERS"), t("DESCRIPTION")),
            (
                (
                    row.id[:8],
                    row.name,
                    row.owner,
                    row.visibility,
                    ", ".join(str(parameter["name"]) for parameter in row.parameters),
                    row.description,
                )
                for row in result
            ),
        ),
    )


def show(template: TemplateArgument, json: JsonOption = False) -> None:
    with Client() as client:
        result = client.templates.find(template)
    output.print_result(result.raw, lambda: show_template(result))


def show_template(result: Template) -> None:
    output.print_fields(
        (
            (t("Template"), result.name),
            ("ID", result.id),
            (t("Owner"), result.owner),
            (t("Description"), result.description),
        )
    )
    for row in result.parameters:
        description_text = row.get("title") or row.get("description") or ""
        output.print_text(
            strip_control(f"  {row['name']} = {row.get('default', '')}  {description_text}")
        )
    output.print_text(yaml.safe_dump(dict(result.spec), allow_unicode=True, sort_keys=False))


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help=t("The template's name."))],
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help=t("Create it from this job file."))
    ] = None,
    from_job: Annotated[str, typer.Option("--from-job", help=t("Create it from this job."))] = "",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter", "-p", metavar="NAME[=DEFAULT]", help=t("A parameter of the job file.")
        ),
    ] = None,
    description: Annotated[
        str, typer.Option("--description", help=t("Description of the template."))
    ] = "",
    visibility: Annotated[
        str, typer.Option("--for", help=t("Visibility: private, namespace or public."))
    ] = "private",
    namespace: Annotated[
        str,
        typer.Option("--namespace", "-n", help=t("Namespace; its members may use the template.")),
    ] = "",
    json: JsonOption = False,
) -> None:
    if (file is None) == (not from_job):
        raise Invalid(t("Give --file or --from-job."), code="usage")
    with Client() as client:
        created = client.templates.create(
            name,
            job_file=file,
            from_job=client.find(from_job) if from_job else None,
            parameters=[parse_parameter(text) for text in parameter or ()],
            description=description,
            visibility=visibility,
            namespace=namespace or None,
        )
    output.print_result(created.raw, lambda: output.print_text(created.id))


def parse_parameter(text: str) -> dict[str, Any]:
    name, sign, default = text.partition("=")
    return {"name": name, "default": default} if sign else {"name": name, "required": True}


def parse_values(options: list[str] | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in options or ():
        name, sign, value = option.partition("=")
        if not sign:
            raise Invalid(t("{text} must be NAME=VALUE.", text=repr(option)), code="usage")
        values[name] = value
    return values


def submit(
    template: TemplateArgument,
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME=VALUE", help=t("Value of a parameter.")),
    ] = None,
    name: NameOption = "",
    namespace: NamespaceOption = "",
    code: Annotated[
        Path | None,
        typer.Option("--code", help=t("The code: a directory, or a zip, tar or tar.gz.")),
    ] = None,
    secret: SecretOption = None,
    follow: FollowJobOption = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        with output.progress_bar(t("Uploading the code")) as update:
            job = client.templates.submit(
                client.templates.find(template).id,
                parse_values(parameter),
                name=name,
                namespace=namespace,
                code=code,
                secrets=parse_secrets(secret),
                progress=bind_file_name(update, ""),
            )
        print_warnings(job.warnings)
        print_and_follow(client, job, follow=follow)


def delete(template: TemplateArgument, json: JsonOption = False) -> None:
    with Client() as client:
        result = client.templates.find(template)
        client.templates.delete(result.id)
    output.print_result(
        {"id": result.id, "deleted": True},
        lambda: output.print_message(t("{name} is deleted.", name=result.name)),
    )
