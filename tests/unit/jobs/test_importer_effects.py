"""No field of another dialect is accepted without effect, warning or refusal; the documentation lists what each does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.jobs.importer_effects import (
    DOCUMENTATION_FIELDS,
    SAMPLES,
    describe_effect,
    list_importer_fields,
    render_importer_table,
)


def test_every_field_of_the_importers_has_a_sample() -> None:
    assert [f for f in list_importer_fields() if f[1] not in SAMPLES[f[0]][1]] == []


@pytest.mark.parametrize(
    ("dialect", "field"),
    [(dialect, field) for dialect, (_, samples) in SAMPLES.items() for field in samples],
)
def test_field_has_an_effect_or_a_warning_or_is_refused(dialect: str, field: str) -> None:
    has_effect = describe_effect(dialect, field) != ""
    assert has_effect is ((dialect, field) not in DOCUMENTATION_FIELDS)


def test_documentation_lists_the_effects() -> None:
    text = (Path(__file__).parents[3] / "docs" / "jobfile.md").read_text()
    shown = text.split("<!-- importer fields: generated, a test compares them -->\n")[1]
    assert shown.split("<!-- end of importer fields")[0] == render_importer_table()
