"""The import-linter contracts in pyproject.toml cover every module of the application."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[3]
PACKAGES = ["core", "accounts", "clusters", "jobs", "engine", "gateway"]


def read_layers_contracts() -> list[dict[str, Any]]:
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert sorted(config["root_packages"]) == sorted(PACKAGES)
    return [contract for contract in config["contracts"] if contract["type"] == "layers"]


def list_modules(package: str) -> list[str]:
    """Dotted names of all modules below a package; `x/__init__.py` is the module `x`."""
    names = []
    for path in (PROJECT / package).rglob("*.py"):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(name for name in names if name != package)


def test_all_packages_are_layers_of_one_contract() -> None:
    (contract,) = [one for one in read_layers_contracts() if "containers" not in one]
    assert sorted(contract["layers"]) == sorted(PACKAGES)


def test_every_module_is_inside_a_layer() -> None:
    covered: list[str] = []
    uncovered: list[str] = []
    contracts = [one for one in read_layers_contracts() if "containers" in one]
    layers = {
        f"{container}.{tail.strip().strip('()')}"
        for contract in contracts
        if contract.get("exhaustive") and not contract.get("exhaustive_ignores")
        for container in contract["containers"]
        for layer in contract["layers"]
        for tail in re.split(r"[|:]", layer)
    }
    for package in PACKAGES:
        for module in list_modules(package):
            child = ".".join(module.split(".")[:2])
            (covered if child in layers else uncovered).append(module)
    assert uncovered == []
    assert len(covered) > 150
