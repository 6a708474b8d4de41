"""How many processes batch.sh, task.sh and enter.sh start for a job of one task: most of what a small job costs on its node.

`scripts/bench node_cost` compares the same with a hand-written script, in a real container.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jobs.script.paths import AttemptPaths
from jobs.script.task_state import parse_script_result, parse_task_state
from tests.unit.jobs.rendering import render_job

SYSTEM_DIRS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin")
# Programs that a node without Slurm, containers and user namespaces can run, too. Each becomes the program that it would start.
FAKES = {
    "srun": 'while (($#)) && [[ $1 != /bin/bash ]]; do [[ $1 != --input=* ]] || exec <"${1#*=}"; shift; done\n'
    "export SLURM_PROCID=0 SLURM_STEP_ID=0",
    "apptainer": "while (($#)) && [[ $1 != /bin/sh ]]; do shift; done",
    "unshare": "while (($#)) && [[ $1 != /bin/sh ]]; do shift; done",
    "mount": "exit 0",
}
# Prints the number of processes that the script was and started: process ids of a new namespace begin with 1, that of this shell.
COUNT = 'PATH=$SCRIPT_PATH /bin/bash "$1" >"$2" 2>&1; (echo "$((BASHPID - 2))"); :'


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory for PATH with all programs of this machine, each of which writes its name to a file."""
    directory = tmp_path / "bin"
    directory.mkdir()
    recorder = tmp_path / "recorder"
    record = tmp_path / "programs"
    lines = ["#!/bin/bash", f'echo "${{0##*/}}" >>"{record}"', "case ${0##*/} in"]
    lines += [f'{name}) {text}; exec "$@"; exit ;;' for name, text in FAKES.items()]
    lines += [
        "esac",
        f"PATH={':'.join(SYSTEM_DIRS)}",
        'hash "${0##*/}" && exec "${BASH_CMDS[${0##*/}]}" "$@"',
    ]
    recorder.write_text("\n".join(lines) + "\n")
    recorder.chmod(0o755)
    names = {name for place in SYSTEM_DIRS if os.path.isdir(place) for name in os.listdir(place)}
    for name in names | set(FAKES):
        (directory / name).hardlink_to(recorder)
    return directory


def run_job(tmp_path: Path, programs: Path, **role: Any) -> tuple[int, Counter[str], AttemptPaths]:
    """Run a job of one task; returns the number of processes, the programs and the paths."""
    image = tmp_path / "image.sif"
    image.write_text("not a real image")
    paths = AttemptPaths(str(tmp_path / "work"), "j", 1)
    job = {
        "jobName": "j",
        "image": str(image),
        "taskRoles": [{"name": "w", "command": "echo hi", **role}],
    }
    Path(paths.logs_dir).mkdir(parents=True)
    for name, text in render_job(job, paths, runtime="apptainer").items():
        Path(paths.path_to(name)).write_text(text)
    environment = {
        **{
            "SCRIPT_PATH": str(programs),
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
            "LANG": "C",
        },
        # A node's name of its own: task.sh removes directories that killed tasks have left on the node.
        **{
            "SLURM_JOB_ID": "7",
            "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
            "SLURMD_NODENAME": f"n{os.getpid()}",
        },
    }
    namespace = [
        "unshare",
        *(["--user", "--map-root-user"] if os.getuid() else []),
        "--pid",
        "--fork",
        "--mount-proc",
    ]
    done = subprocess.run(
        [*namespace, "/bin/bash", "-c", COUNT, "count", paths.batch_script, paths.batch_log],
        cwd=paths.dir,
        env={**environment, "PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    started = Counter((tmp_path / "programs").read_text().split())
    return int(done.stdout), started, paths


def test_job_of_one_task_starts_few_processes(tmp_path: Path, programs: Path) -> None:
    processes, started, paths = run_job(tmp_path, programs)
    assert Path(paths.task_log("w", 0)).read_text() == "hi\n", Path(paths.batch_log).read_text()
    # mkdir: the directories of the attempt; those of the task. unshare and mount: /dev/shm. bash: the job's command.
    expected = ["mkdir", "srun", "mkdir", "unshare", "mount", "unshare", "apptainer", "bash", "rm"]
    assert not started - Counter(expected)
    # Besides batch.sh itself: its start_step, srun (which becomes task.sh), the reader of requests in task.sh, unshare (which
    # becomes apptainer and enter.sh), and one process for each of mkdir, mkdir, mount, bash and rm.
    assert processes == 1 + 4 + 5, started
    assert parse_script_result(Path(paths.path_to("result")).read_text()).outcome == "completed"
    state = parse_task_state(Path(paths.path_to("tasks", "w-0.state")).read_text())
    assert (state.state, state.ip, state.exit_code) == ("ended", "10.0.0.1", 0)
