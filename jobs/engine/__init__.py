"""The engine: makes clusters agree with the rows, over and over, and writes what it saw."""

from __future__ import annotations

from jobs.engine.loop import Engine

__all__ = ["Engine"]
