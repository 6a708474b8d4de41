"""Images."""

from __future__ import annotations

from pathlib import Path

from embedded.layout import Layout


def provide(layout: Layout, *, log: Path) -> list[str]:
    return []
