"""Rendered scripts pass shellcheck, including scripts with hostile strings."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.unit.jobs.test_render_script import COMMON, LAYOUTS, PS, WORKER, render_job


@pytest.mark.slow
def test_rendered_scripts_pass_shellcheck(tmp_path: Path) -> None:
    hostile = {
        **COMMON,
        "jobEnvs": {"A": "$(id) `id` \"'", "B": "\n#SBATCH --x"},
        "dataDir": "/d $(x) `y`",
        "image": "a/$b`c`",
        "authFile": "~/auth $(x) `y`",
        "jobssh": True,
        "taskRoles": [{**PS, "name": "-p.s~"}, {**WORKER, "name": "a.b"}],
    }
    # Covers every layout and runtime; singularity takes the same arguments as apptainer.
    chosen = [
        (LAYOUTS["packed"], "apptainer"),
        (LAYOUTS["het"], "none"),
        (LAYOUTS["simple"], "enroot"),
        (LAYOUTS["packed"], "pyxis"),
        (hostile, "apptainer"),
    ]
    scripts: list[str] = []
    for number, (job, runtime) in enumerate(chosen):
        login = {"username": "$u", "password": "`p` '"}
        logins = {str(job["image"]): login} if runtime == "apptainer" else {}
        for path, text in render_job(job, runtime=runtime, image_logins=logins).items():
            file = tmp_path / f"{number}-{path}"
            file.write_text(text)
            scripts.append(str(file))
    assert len(scripts) == 24
    found = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("", 0)
