"""Which test shows the effect of each job file field, from the marker `proves` of the tests; and on which runtimes.

The table in docs/jobfile.md is rendered from this; a test compares them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from tests.unit.jobs.field_table import list_fields

TESTS = Path(__file__).parents[2]
ALL_RUNTIMES = "all"
# Fields whose effect depends on the container runtime of the cluster.
RUNTIME_NOTES: Mapping[str, str] = {
    "image": "all but none, which has no containers",
    "taskRoles[].image": "all but none, which has no containers",
    "authFile": "all but none, which warns",
    "taskRoles[].shmMB": "all but none, which warns; Pyxis: per role and node",
    "alerts": "all; warns that it is not active yet",
    "services": "all; warns that it is not active yet",
    "metrics": "all; warns that it is not active yet",
}


def find_proofs() -> dict[str, list[str]]:
    """Find the tests that name each field in their marker: field → file::test.

    A marker "alerts.*" names the field `alerts` and all fields below it.
    """
    fields = [row.path for row in list_fields()]
    proofs: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.proves" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test = f"{path.relative_to(TESTS)}::{node.name}"
                for marked in _list_marked_fields(node):
                    section = marked.removesuffix(".*")
                    below = [f for f in fields if f.startswith((section + ".", section + "["))]
                    for field in [section, *(below if marked.endswith(".*") else [])]:
                        proofs.setdefault(field, []).append(test)
    return proofs


def _list_marked_fields(function: ast.FunctionDef) -> list[str]:
    return [
        ast.literal_eval(argument)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.proves"
        for argument in decorator.args
    ]


def render_proof_table() -> str:
    proofs = find_proofs()
    lines = ["| field | runtimes | shown by |", "|---|---|---|"]
    for row in list_fields():
        runtimes = RUNTIME_NOTES.get(row.path, ALL_RUNTIMES)
        tests = ", ".join(f"`{test}`" for test in proofs.get(row.path, [])[:2])
        lines.append(f"| `{row.path}` | {runtimes} | {tests} |")
    return "\n".join(lines) + "\n"
