"""Loading a mutated job file returns a job or raises SpecError, never another exception."""

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
from jobs.jobfile.importers import SiteCatalog, load_document
from jobs.jobfile.parse import parse_text

FILES = Path(__file__).parent / "jobfiles"
NAMES = ("segmentation.json", "finetune-v2.yaml", "prophecis-storage.yaml", "octopus.json")
SITE = SiteCatalog(storages={"team": "/t"}, sizes={"small": {"cpuNumber": 2}})
MUTATIONS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2.5, 1e308, 10**30, "", " ", "x", "a b", "-", "..", "\x00", "\ud800",
    "中", "$(id)", [], [None], [[]], [{}], {}, {"": None}, {"a": {"b": []}}, "1", "yes", "9" * 400,
)  # fmt: skip


def list_locations(value: Any, loc: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [loc] if loc else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += list_locations(inner, (*loc, key))
    return found


def mutate(document: Any, rng: random.Random) -> Any:
    mutated = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        loc = rng.choice(list_locations(mutated))
        parent = mutated
        for part in loc[:-1]:
            parent = parent[part]
        draw = rng.random()
        if draw < 0.6:
            parent[loc[-1]] = copy.deepcopy(rng.choice(MUTATIONS))
        elif draw < 0.8:
            del parent[loc[-1]]
        elif isinstance(parent, dict):
            parent[rng.choice(("x", "", "taskRole", "NAME", "a.b", "\x00"))] = 1
        if not list_locations(mutated):
            break
    return mutated


def load_outcome(document: Any) -> tuple[JobSpec | None, tuple[Problem, ...]]:
    try:
        return load_document(document, site=SITE).spec, ()
    except SpecError as error:
        return None, error.problems


@pytest.mark.parametrize("name", NAMES)
def test_mutated_files_are_accepted_or_raise_spec_error(name: str):
    document = parse_text((FILES / name).read_bytes(), filename=name).document
    rng = random.Random(name)  # the same mutations on every run
    outcomes = {"accepted": 0, "rejected": 0}
    for _ in range(600):
        spec, problems = load_outcome(mutate(document, rng))
        outcomes["rejected" if spec is None else "accepted"] += 1
        assert all(problem.message.endswith((".", "?")) for problem in problems)
        assert json.dumps([problem.as_dict() for problem in problems]).encode()
        if spec is not None:
            assert load_document(json.loads(dump(spec))).spec == spec
    assert min(outcomes.values()) > 50
