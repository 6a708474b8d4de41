"""The translators' list of Slurm's reasons is the list of Slurm's reasons."""

from __future__ import annotations

from clusters.slurm import reasons
from jobs.pending_words import TEMPLATES, WORDS


def test_every_template_and_word_is_listed_for_translation() -> None:
    templates = {explanation.template for explanation in reasons.REASONS.values()}
    templates |= set(reasons._LIMIT_TEMPLATES.values())
    templates |= {explanation.template for _, explanation in reasons._FREE_TEXT}
    templates.add(reasons.explain_reason("never heard of").template)
    assert set(TEMPLATES) == templates
    words = {*reasons._WHAT.values(), *reasons._OWNER.values(), *reasons._SCOPE.values()}
    assert set(WORDS) == words
