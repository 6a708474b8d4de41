"""Apptainer for the embedded cluster."""

from __future__ import annotations

from pathlib import Path

from embedded.layout import SHARED_DIR

PREFIX = SHARED_DIR / "apptainer"


def path_for_logins(system_path: str) -> str:
    return f"{PREFIX}/bin:{system_path}"


def provide(*, log: Path) -> list[str]:
    return []


def path_addition() -> str:
    return f"{PREFIX}/bin"
