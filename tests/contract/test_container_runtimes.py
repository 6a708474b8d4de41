"""Command lines of container runtimes that cannot be installed in the test environment: enroot 4.1, pyxis 0.24.

Fake programs record their arguments and execute the command given to them, so the complete batch script runs
without Slurm. The asserted syntax is that of the real programs: `enroot create --name NAME IMAGE`,
`enroot start --rw --mount FSTAB… NAME COMMAND…` (an fstab entry with colons instead of spaces),
`enroot import --output FILE URI`, and the srun options --container-* of pyxis.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jobs.script.paths import AttemptPaths
from jobs.script.task_state import parse_script_result, parse_task_state
from tests.unit.jobs.rendering import render_job

RECORD_ARGUMENTS = """#!/bin/bash
{ printf '%s\\x1f' "${0##*/}" "$@"; printf '\\n'; } >>"$RECORD"
"""
# The command starts at the first argument that is a shell.
FAKE_PROGRAMS = {
    "enroot": """case $1 in
  import) : >"$3" ;;
  start) while [[ $1 != /bin/sh ]]; do shift; done; exec "$@" ;;
esac
""",
    "srun": """if [[ -n ${SRUN_FAILED_ONCE-} && ! -e $SRUN_FAILED_ONCE ]]; then
  : >"$SRUN_FAILED_ONCE"
  printf '%s\n' "$SRUN_ERROR" >&2
  exit 1
fi
while [[ $1 != /bin/bash ]]; do
  [[ $1 != --input=* ]] || exec <"${1#--input=}"
  shift
done
export SLURM_PROCID=0 SLURM_STEP_ID=0 SLURMD_NODENAME=n1
[[ -n ${SPLIT_LINES-} ]] || exec "$@"
"$@" | while IFS= read -r line; do
  printf '%s' "${line:0:3}"
  sleep 1.2
  printf '%s\n' "${line:3}"
done
exit "${PIPESTATUS[0]}"
""",
    "scancel": "",
}


class FakeSlurmNode:
    """Runs an attempt's batch script in a directory with the fake programs on PATH."""

    def __init__(self, root: Path) -> None:
        self.home, self.record = root / "home", root / "record"
        self.paths = AttemptPaths(str(root / "work"), "j", 1)
        programs = root / "bin"
        for directory in (self.home, programs):
            directory.mkdir()
        for name, body in FAKE_PROGRAMS.items():
            (programs / name).write_text(RECORD_ARGUMENTS + body)
            (programs / name).chmod(0o755)
        self.env = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "RECORD": str(self.record),
            "SLURM_JOB_ID": "77",
            "TMPDIR": str(root),
            "LANG": "C",
        }

    def run(
        self, job: dict[str, Any], runtime: str, expected_stderr: str = ""
    ) -> tuple[int, list[list[str]]]:
        rendered = render_job(job, self.paths, runtime=runtime, grace_s=1)
        for path, text in rendered.items():
            file = Path(self.paths.path_to(path))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        done = subprocess.run(
            ["/bin/bash", self.paths.batch_script],
            cwd=self.paths.dir,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == expected_stderr
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return done.returncode, [line.split("\x1f")[:-1] for line in lines]


@pytest.fixture
def node(tmp_path: Path) -> FakeSlurmNode:
    return FakeSlurmNode(tmp_path)


def job_document(data: Path, **more: Any) -> dict[str, Any]:
    data.mkdir()
    role = {"name": "w", "shmMB": 64, "command": 'echo "$GREETING $PAI_TASK_INDEX"; exit 3', **more}
    return {
        "jobName": "j",
        "image": "nvcr.io/nv/torch:1",
        "dataDir": str(data),
        "jobEnvs": {"GREETING": "it's `me`"},
        "taskRoles": [role],
    }


def option_values(argv: list[str], option: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == option]


def check_outcome(node: FakeSlurmNode, code: int) -> None:
    assert code == 3
    assert Path(node.paths.task_log("w", 0)).read_text() == "it's `me` 0\n"
    state = parse_task_state(Path(node.paths.path_to("tasks", "w-0.state")).read_text())
    assert (state.state, state.exit_code, state.host) == ("ended", 3, "n1")
    result = parse_script_result(Path(node.paths.path_to("result")).read_text())
    assert (result.outcome, result.rule, result.role, result.index) == (
        "failed",
        "min_failed",
        "w",
        0,
    )


ALLOCATION_ERROR = "srun: error: Unable to confirm allocation for job 77: "


def test_step_launch_is_retried_while_controller_restarts(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    """Only the step launch is repeated if slurmctld restarts during it."""
    stderr_text = ALLOCATION_ERROR + "Unable to contact slurm controller (connect failure)"
    node.env |= {"SRUN_FAILED_ONCE": str(tmp_path / "once"), "SRUN_ERROR": stderr_text}
    code, calls = node.run(
        job_document(tmp_path / "data"), "none", expected_stderr=f"{stderr_text}\n"
    )
    check_outcome(node, code)
    assert [call[0] for call in calls] == ["srun", "srun"]


def test_other_srun_failures_are_not_retried(node: FakeSlurmNode, tmp_path: Path) -> None:
    stderr_text = ALLOCATION_ERROR + "Invalid job id specified"
    node.env |= {"SRUN_FAILED_ONCE": str(tmp_path / "once"), "SRUN_ERROR": stderr_text}
    code, calls = node.run(
        job_document(tmp_path / "data"), "none", expected_stderr=f"{stderr_text}\n"
    )
    assert code == 1
    assert [call[0] for call in calls] == ["srun"]


def test_runtime_none_uses_no_container(node: FakeSlurmNode, tmp_path: Path) -> None:
    code, calls = node.run(job_document(tmp_path / "data"), "none")
    check_outcome(node, code)
    assert [call[0] for call in calls] == ["srun"]
    assert not any(word.startswith("--container") for word in calls[0])


def test_task_reports_split_across_reads_are_joined(node: FakeSlurmNode, tmp_path: Path) -> None:
    """bash's `read -t` can time out in the middle of a line; seen on a busy node with 28 tasks."""
    node.env["SPLIT_LINES"] = "1"
    code, _ = node.run(job_document(tmp_path / "data"), "none")
    check_outcome(node, code)


def test_enroot_imports_creates_starts_and_removes_the_container(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    code, calls = node.run(job_document(tmp_path / "data"), "enroot")
    check_outcome(node, code)
    image = f"{node.home}/.cache/sluice/images/nvcr.io_nv_torch_1.sqsh"
    fetch, create, start, remove = (call for call in calls if call[0] == "enroot")
    assert fetch[1:] == ["import", "--output", f"{image}.77", "docker://nvcr.io#nv/torch:1"]
    name = "sluice-77-0-0-0"
    assert create[1:] == ["create", "--name", name, image]
    assert start[1:3] == ["start", "--rw"]
    mounts = option_values(start, "--mount")
    data = tmp_path / "data"
    assert f"{node.paths.dir}:{node.paths.dir}:none:x-create=auto,rbind,rw" in mounts
    assert f"{data}:/dataset:none:x-create=auto,rbind,ro" in mounts
    assert "tmpfs:/dev/shm:tmpfs:x-create=dir,size=64m" in mounts
    assert start[start.index("/bin/sh") - 1] == name
    assert remove[1:] == ["remove", "--force", name]


def test_pyxis_gets_image_and_mounts_as_srun_options(node: FakeSlurmNode, tmp_path: Path) -> None:
    code, calls = node.run(job_document(tmp_path / "data"), "pyxis")
    check_outcome(node, code)
    (srun,) = (call for call in calls if call[0] == "srun")
    container_options = dict(
        word.split("=", 1) for word in srun if word.startswith("--container") and "=" in word
    )
    assert (
        container_options["--container-image"]
        == f"{node.home}/.cache/sluice/images/nvcr.io_nv_torch_1.sqsh"
    )
    data = tmp_path / "data"
    mounts = container_options["--container-mounts"].split(",")
    assert f"{data}:/dataset:ro" in mounts
    assert f"{node.paths.dir}:{node.paths.dir}" in mounts
    assert {"--container-mount-home", "--container-writable"} <= set(srun)
    assert srun.index("/bin/bash") > max(
        i for i, w in enumerate(srun) if w.startswith("--container")
    )
