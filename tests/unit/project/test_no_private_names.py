"""No module uses a private name of paramiko, because any release may change it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

PROJECT = Path(__file__).resolve().parents[3]
SKIPPED_DIRS = {".venv", "node_modules", "var", "__pycache__", ".git"}
PARAMIKO_CLASSES = [
    cls for _name, cls in inspect.getmembers(paramiko, inspect.isclass)
    if cls.__module__.startswith("paramiko.")
]  # fmt: skip
# Without common names such as `_log`, which other classes have too.
PARAMIKO_PRIVATE_NAMES = {
    name
    for cls in (paramiko.Transport, paramiko.Channel, paramiko.SFTPClient)
    for name in dir(cls)
    if name.startswith("_") and not name.endswith("__") and name not in dir(object)
} - {"_log", "_request", "_name", "_started", "_stop", "_delete"}

# Files without a match are not parsed.
MAY_BE_USED = re.compile(
    "|".join([r"\bparamiko\b", *(rf"\.{n}\b" for n in PARAMIKO_PRIVATE_NAMES)])
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_own_object(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def imports_paramiko(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name.startswith("paramiko") for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paramiko"):
            return True
    return False


def find_private_uses(source: str) -> Iterator[str]:
    """Yield uses of private attributes of objects other than self, and overrides in subclasses of paramiko classes.

    In a module that imports paramiko every such attribute counts; elsewhere only names that paramiko defines.
    """
    tree = ast.parse(source)
    strict = imports_paramiko(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_own_object(node.value) and (strict or node.attr in PARAMIKO_PRIVATE_NAMES):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).startswith("paramiko.") for base in node.bases
        ):
            yield from (
                f"line {node.lineno}: class {node.name}: {name}" for name in overrides(node)
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paramiko"):
            yield from (
                f"line {node.lineno}: import {a.name}" for a in node.names if is_private(a.name)
            )


def overrides(cls: ast.ClassDef) -> Iterator[str]:
    inherited = {name for known in PARAMIKO_CLASSES for name in dir(known) if is_private(name)}
    for node in cls.body:
        names = []
        if isinstance(node, ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name in inherited)


def source_files() -> list[Path]:
    return [
        path
        for path in sorted(PROJECT.rglob("*.py"))
        if not SKIPPED_DIRS & set(path.relative_to(PROJECT).parts)
    ]


def test_no_private_names_of_paramiko_are_used() -> None:
    found = [
        f"{path.relative_to(PROJECT)} {use}"
        for path in source_files()
        if MAY_BE_USED.search(source := path.read_text())
        for use in find_private_uses(source)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import paramiko\nself.transport._anything()",
        "import paramiko\nparamiko.Transport._channel_handler_table",
        "import paramiko\nclass T(paramiko.Transport):\n    _channel_handler_table = {}",
        "import paramiko\nclass C(paramiko.Channel):\n    def _handle_request(self, m): pass",
        "from paramiko.util import _x",
        "self.connection.transport._send_user_message(message)",
    ],
)
def test_private_uses_are_found(source: str) -> None:
    assert list(find_private_uses(source))


def test_own_private_names_are_allowed() -> None:
    source = (
        "import paramiko\nclass A:\n    def f(self):\n        return self._x, super().__init__()"
    )
    assert not list(find_private_uses(source))
