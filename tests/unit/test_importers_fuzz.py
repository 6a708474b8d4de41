"""Any damage to any known file gives a job or a SpecError, never another exception."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from jobs.jobfile import (
    JobSpec,
    Problem,
    SpecError,
    dump,
)
from jobs.jobfile.importers import Site, load_document
from jobs.jobfile.parse import parse_text

FILES = Path(__file__).parent / "jobfiles"
NAMES = ("segmentation.json", "finetune-v2.yaml", "prophecis-storage.yaml", "octopus.json")
SITE = Site(storages={"team": "/t"}, sizes={"small": {"cpuNumber": 2}})
DAMAGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, 1e308, 10**30, "", " ", "x", "a b", "-", "..", "\x00", "\ud800",
    "中", "$(id)", [], [None], [[]], [{}], {}, {"": None}, {"a": {"b": []}}, "1", "yes", "9" * 400,
)  # fmt: skip


def places(value: Any, loc: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [loc] if loc else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += places(inner, (*loc, key))
    return found


def damaged(document: Any, chance: random.Random) -> Any:
    broken = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        loc = chance.choice(places(broken))
        parent = broken
        for part in loc[:-1]:
            parent = parent[part]
        what = chance.random()
        if what < 0.6:
            parent[loc[-1]] = copy.deepcopy(chance.choice(DAMAGE))
        elif what < 0.8:
            del parent[loc[-1]]
        elif isinstance(parent, dict):
            parent[chance.choice(("x", "", "taskRole", "NAME", "a.b", "\x00"))] = 1
        if not places(broken):
            break
    return broken


def outcome(document: Any) -> tuple[JobSpec | None, tuple[Problem, ...]]:
    try:
        return load_document(document, site=SITE).spec, ()
    except SpecError as error:
        return None, error.problems


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_a_job_or_a_spec_error(name: str):
    document = parse_text((FILES / name).read_bytes(), filename=name).document
    chance = random.Random(name)  # the same damage on every run
    outcomes = {"job": 0, "refused": 0}
    for _ in range(600):
        spec, problems = outcome(damaged(document, chance))
        outcomes["refused" if spec is None else "job"] += 1
        assert all(problem.message.endswith((".", "?")) for problem in problems)
        assert json.dumps([problem.as_dict() for problem in problems]).encode()
        if spec is not None:
            assert load_document(json.loads(dump(spec))).spec == spec
    assert min(outcomes.values()) > 50
