"""`manage.py`: runs Django's commands and reports errors of configuration and database as one sentence.

Only expected errors are shortened; any other exception keeps its traceback, and `--traceback` shows those of all.
"""

from __future__ import annotations

import os
import sys

import django
from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line
from django.db import DEFAULT_DB_ALIAS, InterfaceError, OperationalError, ProgrammingError

EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
# These commands run until they are stopped. Without a usable database each of their requests or passes would fail.
SERVER_COMMANDS = ("serve", "engine")
NOT_PREPARED = "The database has no tables for this version of Sluice. Run: manage.py migrate"


class DatabaseNotPrepared(Exception):
    pass


def run(argv: list[str]) -> int:
    """Run the command and return the exit status. Commands that report failures themselves end the process."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")
    try:
        if argv[1:2] and argv[1] in SERVER_COMMANDS and not {"-h", "--help"} & set(argv):
            require_prepared_database()
        execute_from_command_line(argv)
    except Exception as error:
        sentence = explain(error)
        if not sentence or "--traceback" in argv:
            raise
        print(f"manage.py: {sentence}", file=sys.stderr)  # noqa: T201
        return EXIT_MISCONFIGURED if isinstance(error, ImproperlyConfigured) else EXIT_FAILED
    return 0


def explain(error: Exception) -> str:
    """Return the sentence for an expected error; the empty string for any other."""
    if isinstance(error, ImproperlyConfigured):
        return str(error)
    if isinstance(error, DatabaseNotPrepared) or _is_missing_table(error):
        return NOT_PREPARED
    if isinstance(error, OperationalError | InterfaceError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"The database cannot be used: {lines[0].rstrip('.')}. Check DATABASE_URL and SLUICE_HOME."
    return ""


def require_prepared_database() -> None:
    """Raise DatabaseNotPrepared if a migration is missing, and OperationalError if the database does not respond."""
    django.setup()
    # These need the settings.
    from django.db import connections
    from django.db.migrations.executor import MigrationExecutor

    connection = connections[DEFAULT_DB_ALIAS]
    try:
        executor = MigrationExecutor(connection)
        if executor.migration_plan(executor.loader.graph.leaf_nodes()):
            raise DatabaseNotPrepared
    finally:
        connection.close()


def _is_missing_table(error: Exception) -> bool:
    if not isinstance(error, OperationalError | ProgrammingError):
        return False
    # PostgreSQL: undefined_table, undefined_column.
    code = getattr(error.__cause__, "pgcode", "")
    return code in ("42P01", "42703") or str(error).startswith(("no such table", "no such column"))
