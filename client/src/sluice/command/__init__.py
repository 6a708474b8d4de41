"""The `sluice` command. Expected errors are shown without a traceback.

Exit codes: 0 success (of a command that follows a job: the job COMPLETED), 1 failure, 2 usage error, 3 server not
reachable or not signed in, 130 the user stopped following with Ctrl-C.
"""

from __future__ import annotations

import os
import sys

import typer

from sluice.command import jobs, output, results, start, templates
from sluice.config import cache_path, read_password_credentials
from sluice.errors import SluiceError, Unauthorized
from sluice.messages import t


def make_app() -> typer.Typer:
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=t("Submit jobs to a Slurm cluster, follow them and download their results."),
    )
    start.register(app)
    jobs.register(app)
    results.register(app)
    app.add_typer(templates.make_app(), name="template")
    return app


def main() -> None:
    output.set_json_mode("--json" in sys.argv[1:])
    try:
        make_app()(prog_name="sluice")
    except SluiceError as error:
        if isinstance(error, Unauthorized) and read_password_credentials():
            # The rejected token was created with the password in the environment. The next command creates a new one.
            cache_path().unlink(missing_ok=True)
        sys.exit(output.print_error(error))
    except KeyboardInterrupt:
        sys.exit(output.EXIT_DETACHED)
    except BrokenPipeError:
        # The reader of stdout has closed the pipe, as `| head` does. At exit Python would fail to flush stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(output.EXIT_FAILED)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        output.print_message(f"{place}{error.strerror or error}", "red")
        sys.exit(output.EXIT_FAILED)
