"""The tree in the docstring of clusters.errors lists every error class under its base class."""

from __future__ import annotations

import re

from clusters import errors
from clusters.slurm import sbatch


def test_docstring_shows_the_exception_tree():
    assert errors.__doc__ is not None
    drawn, bases = {}, {}
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([│ ]*)(?:[├└]── )?([A-Z]\w+)", line):
            depth = line.index(match[2]) // 4
            bases[depth] = match[2]
            drawn[match[2]] = bases.get(depth - 1, "")
    classes = [errors.ClusterError, sbatch.SubmissionAbandoned]
    classes += [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.ClusterError)
    ]
    expected = {cls.__name__: cls.__base__.__name__ for cls in classes}
    assert drawn == {**expected, "ClusterError": ""}
