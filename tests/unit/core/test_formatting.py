"""core.formatting, with the same cases that tests/js/format.test.js checks for static/sluice/format.js."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.utils import translation

from core import formatting
from jobs.jobfile.fields import parse_memory_mib

CASES = json.loads((Path(__file__).parents[2] / "formatting_cases.json").read_text())
FORMATTERS = {
    "duration": formatting.duration,
    "compactDuration": formatting.compact_duration,
    "memory": formatting.memory,
    "hours": formatting.hours,
    "filesize": formatting.filesize,
}


@pytest.mark.parametrize("name", CASES)
def test_python_and_browser_formatting_agree(name: str) -> None:
    with translation.override("en"):
        for value, text in CASES[name]:
            assert {**FORMATTERS, "parseMemory": parse_memory_mib}[name](value) == text


def test_missing_value_is_a_dash() -> None:
    assert {formatter(None) for formatter in FORMATTERS.values()} == {"–"}
