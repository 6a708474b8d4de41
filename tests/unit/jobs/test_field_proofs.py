"""Every field of the job file has a test that shows its effect, its refusal or its warning."""

from __future__ import annotations

from pathlib import Path

from tests.unit.jobs.field_proofs import find_proofs, render_proof_table
from tests.unit.jobs.field_table import list_fields


def test_every_field_has_a_test_that_shows_its_effect() -> None:
    fields, proofs = {row.path for row in list_fields()}, find_proofs()
    assert sorted(fields - proofs.keys()) == []
    assert sorted(proofs.keys() - fields) == []  # a marker names a field that does not exist


def test_documentation_lists_the_tests() -> None:
    text = (Path(__file__).parents[3] / "docs" / "jobfile.md").read_text()
    shown = text.split("<!-- proofs: generated, a test compares them -->\n")[1]
    assert shown.split("<!-- end of proofs")[0] == render_proof_table()
