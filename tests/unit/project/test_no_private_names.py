"""No module uses a private name of paramiko, Daphne, Twisted or Autobahn, because any release may change it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

PROJECT = Path(__file__).resolve().parents[3]
SKIPPED_DIRS = {".venv", "node_modules", "var", "__pycache__", ".git"}
LIBRARIES = ("paramiko", "daphne", "twisted", "autobahn")
# Modules of Twisted and Autobahn whose classes Sluice uses or extends through Daphne.
LIBRARY_FILES = {
    "paramiko": ["**/*.py"],
    "daphne": ["**/*.py"],
    "twisted": ["web/http.py", "web/http_headers.py", "internet/*.py", "protocols/policies.py"],
    "autobahn": ["websocket/*.py", "twisted/websocket.py"],
}
# Passed around without importing paramiko, so these names are looked for in all modules. Without common names such as
# `_log`, which other classes have too.
PARAMIKO_PRIVATE_NAMES = {
    name
    for cls in (paramiko.Transport, paramiko.Channel, paramiko.SFTPClient)
    for name in dir(cls)
    if name.startswith("_") and not name.endswith("__") and name not in dir(object)
} - {"_log", "_request", "_name", "_started", "_stop", "_delete"}

# Files without a match are not parsed.
MAY_BE_USED = re.compile(
    "|".join([rf"\b({'|'.join(LIBRARIES)})\b", *(rf"\.{n}\b" for n in PARAMIKO_PRIVATE_NAMES)])
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_own_object(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def library_of(module: str) -> str:
    package = module.partition(".")[0]
    return package if package in LIBRARIES else ""


def imported_libraries(tree: ast.Module) -> dict[str, str]:
    """The names that the module imports from one of the libraries, with the library."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if library := library_of(alias.name):
                    names[alias.asname or alias.name.partition(".")[0]] = library
        elif isinstance(node, ast.ImportFrom) and (library := library_of(node.module or "")):
            names |= {alias.asname or alias.name: library for alias in node.names}
    return names


@functools.cache
def private_names(library: str) -> set[str]:
    """All identifiers with a leading underscore in the source of the library's modules that Sluice extends."""
    spec = importlib.util.find_spec(library)
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    sources = [
        path.read_text() for pattern in LIBRARY_FILES[library] for path in root.glob(pattern)
    ]
    assert sources
    return {
        name for text in sources for name in re.findall(r"\b_[A-Za-z]\w*", text) if is_private(name)
    }


def find_private_uses(source: str) -> Iterator[str]:
    """Yield uses of private attributes of objects other than self, and of inherited ones in subclasses.

    In a module that imports a library every such attribute counts; elsewhere only names that paramiko defines.
    """
    tree = ast.parse(source)
    imported = imported_libraries(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_own_object(node.value) and (imported or node.attr in PARAMIKO_PRIVATE_NAMES):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ClassDef):
            yield from find_inherited_uses(node, imported)
        elif isinstance(node, ast.ImportFrom) and library_of(node.module or ""):
            yield from (
                f"line {node.lineno}: import {a.name}" for a in node.names if is_private(a.name)
            )


def find_inherited_uses(cls: ast.ClassDef, imported: dict[str, str]) -> Iterator[str]:
    bases = [ast.unparse(base).partition(".")[0] for base in cls.bases]
    inherited: set[str] = set()
    # Daphne's classes extend those of Twisted and Autobahn.
    for library in {imported[base] for base in bases if base in imported}:
        related = ("daphne", "twisted", "autobahn") if library == "daphne" else (library,)
        inherited |= {name for each in related for name in private_names(each)}
    for node in ast.walk(cls):
        name = ""
        if isinstance(node, ast.Attribute) and is_own_object(node.value):
            name = node.attr
        elif isinstance(node, ast.FunctionDef):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if name in inherited:
            yield f"line {node.lineno}: class {cls.name}: {name}"  # type: ignore[attr-defined]


def source_files() -> list[Path]:
    return [
        path
        for path in sorted(PROJECT.rglob("*.py"))
        if not SKIPPED_DIRS & set(path.relative_to(PROJECT).parts)
    ]


def test_no_private_names_of_libraries_are_used() -> None:
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
        "from daphne.http_protocol import WebRequest\nself.channel._path",
        "from twisted.internet import reactor\nreactor._asyncioEventloop",
        "from daphne.http_protocol import WebRequest\nclass R(WebRequest):\n    def f(self):\n"
        "        self._parsePOSTFormSubmission = False",
        "from daphne.ws_protocol import WebSocketProtocol\nclass P(WebSocketProtocol):\n"
        "    def f(self):\n        self._sendAutoPing()",
    ],
)
def test_private_uses_are_found(source: str) -> None:
    assert list(find_private_uses(source))


def test_own_private_names_are_allowed() -> None:
    source = (
        "import paramiko\nclass A:\n    def f(self):\n        return self._x, super().__init__()"
    )
    assert not list(find_private_uses(source))
