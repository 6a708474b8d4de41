"""`python -m jobs.management.import_report PATH…`: check a directory of job files.

Prints a table of file, format, verdict, warnings and first problem. With --verdicts it compares the
results with those of another system's validators: a JSON mapping from the file's path to `ok`, and
optionally `normalized` (v1 with defaults), `entrypoints` and `env` (v2). Only reads files.
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
from jobs.script.variables import job_variables

SUFFIXES = (".json", ".yaml", ".yml")
# Values that contain the submitting user's name; not compared.
USER_VARIABLES = ("PAI_JOB_NAME", "PAI_FRAMEWORK_NAME", "PAI_USER_NAME", "PAI_USERNAME")


@dataclass(slots=True)
class ReportRow:
    name: str
    dialect: str = "?"
    verdict: str = "refused"
    warnings: list[str] = field(default_factory=list)
    problem: str = ""
    differences: list[str] = field(default_factory=list)


def find_job_files(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        if path.is_file():
            yield path.name, path
        for found in sorted(path.rglob("*")) if path.is_dir() else ():
            if found.suffix.lower() in SUFFIXES:
                yield str(found.relative_to(path)), found


def check_file(name: str, data: bytes, verdict: Mapping[str, Any] | None) -> ReportRow:
    row = ReportRow(name)
    try:
        result = load_text(data, filename=name)
    except SpecError as error:
        row.dialect = error.dialect or "?"
        row.problem = str(error.problems[0])
        if len(error.problems) > 1:
            row.problem += f" (and {len(error.problems) - 1} more)"
        if verdict and verdict.get("ok"):
            row.differences.append("accepted by the other system, refused here")
        return row
    row.dialect, row.verdict = result.dialect, "accepted"
    row.warnings = [str(warning) for warning in result.warnings]
    if verdict and verdict.get("ok"):
        row.differences += compare_with_verdict(result, verdict)
    return row


def compare_with_verdict(result: LoadResult, verdict: Mapping[str, Any]) -> list[str]:
    """Differences from the other system's result for the same file."""
    found = []
    if "normalized" in verdict and (
        differences := _format_differences(_as_v1(result), verdict["normalized"])
    ):
        found.append(f"normalized: {differences}")
    if "entrypoints" in verdict:
        commands = {role.name: role.command for role in result.spec.task_roles}
        if differences := _format_differences(commands, verdict["entrypoints"]):
            found.append(f"entrypoints: {differences}")
    if "env" in verdict:
        actual = job_variables(result.spec, user="user")
        expected = {k: str(v) for k, v in verdict["env"].items() if k not in USER_VARIABLES}
        if differences := _format_differences({k: actual.get(k) for k in expected}, expected):
            found.append(f"env: {differences}")
    return found


def _as_v1(result: LoadResult) -> dict[str, Any]:
    """The job with only the keys of OpenPAI v1."""
    document = to_document(result.spec)
    document["virtualCluster"] = document.pop("namespace")
    if "jobEnvs" not in document:
        document["jobEnvs"] = {}
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
    parser.add_argument("--verdicts", type=Path, help="JSON file of another system's verdicts")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every warning")
    options = parser.parse_args(arguments)
    verdicts = json.loads(options.verdicts.read_text()) if options.verdicts else {}
    rows = [
        check_file(name, path.read_bytes(), verdicts.get(name))
        for name, path in find_job_files(options.paths)
        if path != options.verdicts
    ]
    sys.stdout.write(render_table(rows, verbose=options.verbose, verdict_count=len(verdicts)))
    return 1 if any(row.differences for row in rows) else 0


def render_table(rows: list[ReportRow], *, verbose: bool, verdict_count: int) -> str:
    width = max([len(row.name) for row in rows] + [4])
    lines = [f"{'file':{width}}  {'format':10}  {'verdict':8}  warnings  first problem"]
    for row in rows:
        lines.append(
            f"{row.name:{width}}  {row.dialect:10}  {row.verdict:8}  {len(row.warnings):8}  {row.problem}".rstrip()
        )
        lines += [f"    differs: {text}" for text in row.differences]
        lines += [f"    warning: {text}" for text in row.warnings] if verbose else []
    accepted = sum(row.verdict == "accepted" for row in rows)
    warned = sum(bool(row.warnings) for row in rows)
    differing = sum(bool(row.differences) for row in rows)
    lines.append(
        f"{len(rows)} files: {accepted} accepted ({warned} with warnings), {len(rows) - accepted} refused."
    )
    if verdict_count:
        lines.append(f"Compared with {verdict_count} verdicts: {differing} files differ.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
