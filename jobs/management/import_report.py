"""`python -m jobs.management.import_report PATH…`: check a directory of job files.

Prints a table of file, format, result, warnings and first problem. With --expected FILE it compares the results
with those of another system's validator. FILE is a JSON mapping from a job file's path to that system's result:
`ok`, and optionally `normalized` (the OpenPAI v1 job file with defaults) or `entrypoints` and `env` (of an OpenPAI v2
job file). Changes no files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.jobfile.errors import SpecError
from jobs.jobfile.importers import LoadResult, load_text
from jobs.jobfile.serialize import to_document
from jobs.script.variables import build_job_variables

JOB_FILE_SUFFIXES = (".json", ".yaml", ".yml")
# Variables whose values contain the name of the submitting user. They are not compared.
USER_VARIABLES = ("PAI_JOB_NAME", "PAI_FRAMEWORK_NAME", "PAI_USER_NAME", "PAI_USERNAME")


@dataclass(slots=True)
class ReportRow:
    """The result for one job file."""

    name: str
    dialect: str = "?"
    result: str = "refused"  # or "accepted"
    warnings: list[str] = field(default_factory=list)
    problem: str = ""
    differences: list[str] = field(default_factory=list)


def find_job_files(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield each given file, and the job files in each given directory, with the name that the report shows."""
    for path in paths:
        if path.is_file():
            yield path.name, path
        else:
            for found in sorted(path.rglob("*")):
                if found.suffix.lower() in JOB_FILE_SUFFIXES:
                    yield str(found.relative_to(path)), found


def check_file(name: str, data: bytes, expected: Mapping[str, Any] | None) -> ReportRow:
    """Import one job file; compare with another system's result for it, if given."""
    row = ReportRow(name)
    try:
        loaded = load_text(data, filename=name)
    except SpecError as error:
        row.dialect = error.dialect or "?"
        row.problem = str(error.problems[0])
        if len(error.problems) > 1:
            row.problem += f" (and {len(error.problems) - 1} more)"
        if expected and expected.get("ok"):
            row.differences.append("accepted by the other system, refused here")
        return row
    row.dialect, row.result = loaded.dialect, "accepted"
    row.warnings = [str(warning) for warning in loaded.warnings]
    if expected and expected.get("ok"):
        row.differences += find_differences(loaded, expected)
    return row


def find_differences(loaded: LoadResult, expected: Mapping[str, Any]) -> list[str]:
    """List the differences from the other system's result for the same file."""
    found = []
    if "normalized" in expected and (
        differences := _format_differences(_to_v1_document(loaded), expected["normalized"])
    ):
        found.append(f"normalized: {differences}")
    if "entrypoints" in expected:
        commands = {role.name: role.command for role in loaded.spec.task_roles}
        if differences := _format_differences(commands, expected["entrypoints"]):
            found.append(f"entrypoints: {differences}")
    if "env" in expected:
        actual = build_job_variables(loaded.spec, user="user")
        variables = {k: str(v) for k, v in expected["env"].items() if k not in USER_VARIABLES}
        if differences := _format_differences({k: actual.get(k) for k in variables}, variables):
            found.append(f"env: {differences}")
    return found


def _to_v1_document(loaded: LoadResult) -> dict[str, Any]:
    """Convert the job to a document with the keys of OpenPAI v1."""
    document = to_document(loaded.spec)
    document["virtualCluster"] = document.pop("namespace")
    document.setdefault("jobEnvs", {})
    return document


def _format_differences(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{key} is {json.dumps(actual.get(key))}, not {json.dumps(value)}"
        for key, value in expected.items()
        if actual.get(key) != value
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.management.import_report", description=__doc__
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--expected", type=Path, help="JSON file of another system's results")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every warning")
    options = parser.parse_args(arguments)
    expected = json.loads(options.expected.read_text()) if options.expected else {}
    rows = [
        check_file(name, path.read_bytes(), expected.get(name))
        for name, path in find_job_files(options.paths)
        if path != options.expected
    ]
    sys.stdout.write(render_table(rows, verbose=options.verbose, expected_count=len(expected)))
    return 1 if any(row.differences for row in rows) else 0


def render_table(rows: list[ReportRow], *, verbose: bool, expected_count: int) -> str:
    width = max([len(row.name) for row in rows] + [4])
    lines = [f"{'file':{width}}  {'format':10}  {'result':8}  warnings  first problem"]
    for row in rows:
        lines.append(
            f"{row.name:{width}}  {row.dialect:10}  {row.result:8}  {len(row.warnings):8}  {row.problem}".rstrip()
        )
        lines += [f"    differs: {text}" for text in row.differences]
        lines += [f"    warning: {text}" for text in row.warnings] if verbose else []
    accepted = sum(row.result == "accepted" for row in rows)
    warned = sum(bool(row.warnings) for row in rows)
    differing = sum(bool(row.differences) for row in rows)
    lines.append(
        f"{len(rows)} files: {accepted} accepted ({warned} with warnings), {len(rows) - accepted} refused."
    )
    if expected_count:
        lines.append(f"Compared with {expected_count} expected results: {differing} files differ.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
