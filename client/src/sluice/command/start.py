"""General commands: sign-in, example project, capacity, completion, version, help."""

from __future__ import annotations

import sys
from importlib.resources import files as resources
from pathlib import Path
from typing import Annotated

import typer

from sluice.client import Client, create_token
from sluice.command import output
from sluice.command.options import JsonOption
from sluice.config import config_path, device_name, read_config, resolve_connection, write_config
from sluice.display import memory_text
from sluice.errors import Invalid, NotConfigured, SluiceError
from sluice.http import normalize_url
from sluice.messages import t
from sluice.values import Json
from sluice.version import VERSION

SHELLS = ("bash", "zsh", "fish")


def register(app: typer.Typer) -> None:
    app.command("login", help=t("Sign in once; the token is stored for later commands."))(login)
    app.command("logout", help=t("Revoke and delete the stored token."))(logout)
    app.command("me", help=t("Your user name, and the namespaces you may submit to."))(me)
    app.command("tokens", help=t("Your tokens; --revoke revokes one."))(tokens)
    app.command("init", help=t("Create a directory with an example manifest and code."))(init)
    app.command(
        "capacity", help=t("Free resources of the clusters, and what you could start now.")
    )(capacity)
    app.command(
        "frameworks",
        help=t("Training frameworks, their strategies and versions."),
    )(frameworks)
    app.command("completion", help=t("Print the completion script for bash, zsh or fish."))(
        completion
    )
    app.command("version", help=t("The version of this command."))(version)
    app.command("help", help=t("This list, or the help of one command."))(help_)


def login(
    url: Annotated[str, typer.Argument(metavar="[URL]", help=t("Sluice's address."))] = "",
    user: Annotated[str, typer.Option("--user", "-u", help=t("Your user name."))] = "",
    token: Annotated[
        str, typer.Option("--token", help=t("A token made on the page, instead of a password."))
    ] = "",
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help=t("Read the password (or token) from stdin."))
    ] = False,
    json: JsonOption = False,
) -> None:
    address = normalize_url(url or prompt_text(t("Sluice's address"), read_config().get("url", "")))
    if address.startswith("http://") and not is_loopback(address):
        output.print_message(
            t("Warning: the connection to {url} is not encrypted.", url=address), "yellow"
        )
    if not token and not user and not password_stdin:
        user = prompt_text(t("User name (empty: sign in with a token)"), "", allow_empty=True)
    stdin_secret = sys.stdin.readline().strip() if password_stdin else ""
    if user:
        password = stdin_secret or prompt_hidden(t("Password"))
        token = create_token(address, user, password, name=device_name()).secret
    elif not token:
        token = stdin_secret or prompt_hidden(t("Token"))
    with Client(address, token) as client:
        user_info = client.me()
    path = write_config({"url": address, "token": token, "user": str(user_info["username"])})
    output.print_result(
        {"url": address, "user": user_info["username"], "config": str(path)},
        lambda: output.print_message(
            t("Signed in to {url} as {user}.", url=address, user=user_info["username"]), "green"
        ),
    )


def is_loopback(url: str) -> bool:
    host = url.partition("://")[2].rpartition(":")[0] or url.partition("://")[2]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def prompt_text(label: str, default: str, *, allow_empty: bool = False) -> str:
    if not sys.stdin.isatty():
        raise Invalid(t("Input is not a terminal. Give the address and --user."), code="usage")
    answer = typer.prompt(label, default=default or ("" if allow_empty else None), err=True)
    return str(answer).strip()


def prompt_hidden(label: str) -> str:
    if not sys.stdin.isatty():
        raise Invalid(t("Input is not a terminal. Use --password-stdin."), code="usage")
    return str(typer.prompt(label, hide_input=True, err=True))


def logout(json: JsonOption = False) -> None:
    saved_config = read_config()
    if saved_config.get("url") and saved_config.get("token"):
        try:
            with Client(saved_config["url"], saved_config["token"]) as client:
                for token in client.tokens.list():
                    if token.is_current:
                        client.tokens.revoke(token.id)
        except SluiceError as error:
            output.print_message(
                t("The token could not be revoked: {problem}", problem=error.message)
            )
    config_path().unlink(missing_ok=True)
    output.print_result({"signed_in": False}, lambda: output.print_message(t("Signed out.")))


def me(json: JsonOption = False) -> None:
    with Client() as client:
        user_info = client.me()
        url = client.url

    def show() -> None:
        namespaces = ", ".join(
            f"{row['namespace']} ({row['role']})" for row in user_info.get("namespaces", ())
        )
        output.print_fields(
            (
                (t("Server"), url),
                (t("User"), user_info["username"]),
                (t("Token scope"), user_info["scope"]),
                (t("Namespaces"), namespaces or t("none")),
            )
        )

    output.print_result(user_info, show)


def tokens(
    revoke: Annotated[int | None, typer.Option("--revoke", help=t("The token's number."))] = None,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        if revoke is not None:
            client.tokens.revoke(revoke)
        result = client.tokens.list()
    output.print_result(
        [token.raw for token in result],
        lambda: output.print_table(
            ("#", t("NAME"), t("PREFIX"), t("SCOPE"), t("EXPIRES"), t("LAST USED"), ""),
            (
                (
                    token.id,
                    token.name,
                    token.prefix,
                    token.scope,
                    output.timestamp_text(token.expires_at),
                    output.timestamp_text(token.last_used_at),
                    t("this one") if token.is_current else "",
                )
                for token in result
            ),
        ),
    )


def init(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help=t("Name of the directory and the job."))
    ],
    json: JsonOption = False,
) -> None:
    directory = Path(name)
    if directory.exists():
        raise Invalid(t("{path} already exists; choose another name.", path=name), code="exists")
    namespace, image = first_namespace()
    starter = resources("sluice") / "starter"
    (directory / "code").mkdir(parents=True)
    manifest = (starter / "manifest.yml").read_text(encoding="utf-8")
    job_name = "".join(c if c.isalnum() or c in "-._" else "-" for c in directory.name)
    manifest_text = manifest.format(name=job_name, namespace=namespace, image=image)
    (directory / "manifest.yml").write_text(manifest_text, encoding="utf-8")
    code = (starter / "code" / "train.py").read_text(encoding="utf-8")
    (directory / "code" / "train.py").write_text(code, encoding="utf-8")
    output.print_result(
        {"directory": str(directory), "manifest": str(directory / "manifest.yml")},
        lambda: output.print_message(
            t(
                "{path} is ready. Next:  cd {path} && sluice train manifest.yml code/",
                path=str(directory),
            ),
            "green",
        ),
    )


def first_namespace() -> tuple[str, str]:
    """Return a namespace in which the user may submit, and its image; defaults if the server cannot be reached."""
    try:
        with Client() as client:
            rows = [row for row in client.namespaces() if row.get("can_submit")]
    except SluiceError as error:
        if not isinstance(error, NotConfigured):
            output.print_message(error.message, "yellow")
        return "default", "python"
    rows.sort(key=lambda row: row["name"] != "default")
    if not rows:
        return "default", "python"
    return str(rows[0]["name"]), str(rows[0].get("default_image") or "python")


def frameworks(
    namespace: Annotated[
        str, typer.Option("--namespace", "-n", help=t("Only versions on its cluster."))
    ] = "",
    json: JsonOption = False,
) -> None:
    with Client() as client:
        rows = client.frameworks(namespace)

    def show() -> None:
        output.print_table(
            (t("FRAMEWORK"), t("STRATEGIES"), t("VERSIONS")),
            (
                (
                    row["name"],
                    ", ".join(strategy["name"] for strategy in row["strategies"]),
                    ", ".join(dict.fromkeys(version["version"] for version in row["versions"])),
                )
                for row in rows
            ),
        )

    output.print_result(list(rows), show)


def capacity(json: JsonOption = False) -> None:
    with Client() as client:
        result = client.capacity()

    def format_gpus(row: Json) -> str:
        return ", ".join(
            f"{gpu['free']}/{gpu['total']} {gpu['type'] or 'GPU'}" for gpu in row["gpus"]
        )

    def show() -> None:
        output.print_table(
            (t("CLUSTER"), t("NODES"), t("CPUS FREE"), t("MEMORY FREE"), t("GPUS FREE")),
            (
                (
                    row["cluster"],
                    f"{row['usable_nodes']}/{row['nodes']}",
                    f"{row['cpus_free']}/{row['cpus']}",
                    f"{memory_text(row['mem_mib_free'])} / {memory_text(row['mem_mib'])}",
                    format_gpus(row),
                )
                for row in result["clusters"]
            ),
        )
        output.print_text("")
        output.print_table(
            (t("NAMESPACE"), t("CPUS PER JOB"), t("MEMORY PER JOB"), t("GPUS PER JOB")),
            (
                (row["namespace"], row["cpus"], memory_text(row["mem_mib"]), format_gpus(row))
                for row in result["namespaces"]
                if row["can_submit"]
            ),
        )

    output.print_result(result, show)


def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh, fish")],
) -> None:
    if shell not in SHELLS:
        raise Invalid(t("Completion exists for bash, zsh and fish."), code="usage")
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    output.print_text(
        get_completion_script(prog_name="sluice", complete_var="_SLUICE_COMPLETE", shell=shell)
    )


def version(json: JsonOption = False) -> None:
    try:
        server = resolve_connection().url
    except SluiceError:
        server = ""
    output.print_result(
        {"version": VERSION, "server": server}, lambda: output.print_text(f"sluice {VERSION}")
    )


def help_(
    context: typer.Context,
    command: Annotated[
        str, typer.Argument(metavar="[COMMAND]", help=t("Name of the command; default: all."))
    ] = "",
) -> None:
    parent = context.parent
    if parent is None:
        return
    if not command:
        output.print_text(parent.get_help())
        return
    result = parent.command.get_command(parent, command)  # type: ignore[attr-defined]
    if result is None:
        raise Invalid(t("Unknown command {name}.", name=repr(command)), code="usage")
    with result.make_context(command, [], parent=parent, resilient_parsing=True) as own:
        output.print_text(result.get_help(own))
