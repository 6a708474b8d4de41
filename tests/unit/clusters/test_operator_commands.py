"""The commands that change something in Slurm: each has a rule in docs/architecture.md that bounds it."""

from __future__ import annotations

import re
from pathlib import Path

import clusters.slurm

PROJECT = Path(clusters.slurm.__file__).parents[2]
SECTION = "## What the service account does for people"


def test_every_command_that_changes_a_job_is_in_the_documentation() -> None:
    builders = [
        (path.name, match[1])
        for path in sorted(Path(clusters.slurm.__file__).parent.glob("*.py"))
        for match in re.finditer(r"action_argv\(\s*\"(\w+)\"(?:, \"(\w+)\")?", path.read_text())
    ]
    # sbatch runs as the person; the others as the service account.
    assert sorted(builders) == [("control.py", "scancel"), ("control.py", "scontrol")]
    text = (PROJECT / "docs" / "architecture.md").read_text()
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    for command in ("scancel", "scancel --batch --signal=USR2", "scontrol update TimeLimit"):
        assert f"`{command}`" in section
