"""Functions of shell/batch.sh and shell/task.sh, run in bash: signals in each phase, time limits, directories on the node."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.script.paths import AttemptPaths
from tests.unit.jobs.rendering import SHELL, TASK_FUNCTIONS, render_job

JOB: dict[str, Any] = {
    "jobName": "j",
    "image": "x",
    "gracePeriod": 5,
    "taskRoles": [{"name": "w", "taskNumber": 1, "command": "sleep 60"}],
}
_BATCH_MAIN = "\nprepare\nwait_for_secrets\n"
NO_PROCESS = 2**22 + 1  # above the kernel's highest process id


@pytest.fixture
def attempt_dir(tmp_path: Path) -> Path:
    """The files of an attempt. batch.functions defines the functions of batch.sh without running the job."""
    paths = AttemptPaths(str(tmp_path), "j", 1)
    directory = Path(paths.dir)
    for name in ("logs", "tasks", "work"):
        (directory / name).mkdir(parents=True)
    for name, text in render_job(JOB, paths, runtime="none").items():
        (directory / name).write_text(text)
    text = (directory / "batch.sh").read_text()
    assert _BATCH_MAIN in text
    (directory / "batch.functions").write_text(text.partition(_BATCH_MAIN)[0] + "\n")
    (directory / "task.functions").write_text(TASK_FUNCTIONS + "\n")
    (directory / "peers.0").write_text("w 0 n1 127.0.0.1 http:2000;ssh:2001;\n")
    (tmp_path / "bin").mkdir()
    return directory


def add_program(attempt_dir: Path, name: str, text: str) -> None:
    program = attempt_dir.parents[2] / "bin" / name
    program.write_text(f"#!/bin/bash\n{text}\n")
    program.chmod(0o755)


def run_bash(attempt_dir: Path, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    root = attempt_dir.parents[2]
    environment = {
        **{"PATH": f"{root}/bin:{os.environ['PATH']}", "HOME": str(root), "TMPDIR": str(root)},
        **{"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"},
    }
    return subprocess.run(
        ["bash", "-c", script, *args],
        cwd=attempt_dir,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def run_batch(attempt_dir: Path, script: str) -> subprocess.CompletedProcess[str]:
    return run_bash(attempt_dir, f". ./batch.functions\n{script}")


def run_task(attempt_dir: Path, script: str) -> subprocess.CompletedProcess[str]:
    return run_bash(
        attempt_dir, f". ./task.functions\n{script}", "task.sh", str(attempt_dir), "0", "0"
    )


def test_limit_at_submission_counts_while_slurm_does_not_reply(attempt_dir: Path) -> None:
    add_program(attempt_dir, "squeue", "exit 1")
    done = run_batch(attempt_dir, 'find_limit_end; printf %s "$limit_end"')
    assert abs(int(done.stdout) - (time.time() + 3600)) < 30


def test_removed_limit_ends_no_task(attempt_dir: Path) -> None:
    add_program(attempt_dir, "squeue", "echo N/A")
    done = run_batch(attempt_dir, 'find_limit_end; printf %s "$limit_end"')
    assert int(done.stdout) > time.time() + 3600 * 12


def test_last_reply_of_slurm_counts_while_it_does_not_reply(attempt_dir: Path) -> None:
    add_program(attempt_dir, "squeue", "[[ ! -e down ]] && date -d '+9 hours' +%FT%T")
    script = 'cd "$attempt_dir"; find_limit_end; touch down; find_limit_end; printf %s "$limit_end"'
    done = run_batch(attempt_dir, script)
    assert abs(int(done.stdout) - (time.time() + 9 * 3600)) < 30


@pytest.mark.parametrize("phase", ["check_directories", "log_job", "make_ssh_keys"])
def test_stop_before_the_steps_starts_none(attempt_dir: Path, phase: str) -> None:
    add_program(attempt_dir, "srun", ": >srun_ran")
    main = (SHELL / "batch.sh").read_text().partition(_BATCH_MAIN)[2]
    done = run_batch(
        attempt_dir, f'{phase}() {{ kill -TERM "$$"; }}\nprepare\nwait_for_secrets\n{main}'
    )
    assert "outcome=stopped\n" in (attempt_dir / "result").read_text(), done.stderr
    assert not (attempt_dir / "srun_ran").exists()


def test_stop_ends_the_fetching_of_an_image(attempt_dir: Path) -> None:
    add_program(attempt_dir, "fetch", 'echo part >"$1"; printf %s $$ >fetch_pid; sleep 20')
    script = """
    prepare
    image_files=("$attempt_dir/image.sif") image_sources=(docker://x) image_names=(x) fetch_command=(fetch)
    (until [[ -s fetch_pid ]]; do sleep 0.05; done; kill -USR2 "$$") &
    check_images
    kill -0 "$(<fetch_pid)" 2>/dev/null && echo "still fetching"
    ls image.sif* 2>/dev/null
    """
    begin = time.monotonic()
    done = run_batch(attempt_dir, script)
    assert "still fetching" not in done.stdout
    assert done.stdout.splitlines()[-1] == "image.sif.lock", done
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("function", ["choose_gpu_devices", "disown"])
def test_signal_while_the_task_is_started_is_not_lost(attempt_dir: Path, function: str) -> None:
    """`disown` runs immediately after the probe process has started."""
    script = f"""
    log_offset=0 sent=''
    trap on_term TERM
    {function}() {{ [[ -n $sent ]] || kill -TERM "$$"; sent=1; }}
    read_peers
    run_task </dev/null
    ((stopping && exit_code)) && finish_task "$exit_code" stopped
    """
    begin = time.monotonic()
    done = run_task(attempt_dir, script)
    state = (attempt_dir / "tasks" / "w-0.state").read_text()
    assert "state=ended\n" in state, done.stderr
    assert "reason=stopped\n" in state
    assert "unbound variable" not in done.stderr
    assert time.monotonic() - begin < 15


def test_only_directories_of_ended_tasks_of_this_node_are_removed(attempt_dir: Path) -> None:
    root = attempt_dir.parents[2]
    uid = os.getuid()
    names = {
        "ended": f"sluice-task.{uid}.n1.{NO_PROCESS}.abcdef",
        "running": f"sluice-task.{uid}.n1.{os.getpid()}.abcdef",
        "other node": f"sluice-task.{uid}.n2.{NO_PROCESS}.abcdef",
        "longer name": f"sluice-task.{uid}.n1.{NO_PROCESS}.{NO_PROCESS}.abcdef",
    }
    for name in names.values():
        (root / name).mkdir()
    done = run_task(attempt_dir, 'make_task_dir; printf %s "$task_dir"; rmdir "$task_dir"')
    assert done.stdout.startswith(f"/tmp/sluice-task.{uid}.n1."), done.stderr
    left = {key for key, name in names.items() if (root / name).exists()}
    assert left == {"running", "other node", "longer name"}


@pytest.mark.parametrize(
    ("end", "left"),
    [
        ("finish", []),  # the job ended by itself
        ("stopping=1 stop_requested=1; finish", []),  # a requested stop
        ("time_limit_near=1 outcome=failed; finish", []),
        ("exit 3", []),
        ('kill -TERM "$$"; stopping=1; finish', ["secrets.sh"]),  # Slurm may requeue the job
    ],
)
def test_secrets_are_removed_at_the_end_unless_slurm_may_requeue(
    attempt_dir: Path, end: str, left: list[str]
) -> None:
    add_program(attempt_dir, "scancel", "exit 0")
    add_program(attempt_dir, "sleep", "exit 0")
    (attempt_dir / "secrets.sh").write_text("")
    (attempt_dir / "ssh").mkdir()
    run_bash(attempt_dir, f". ./batch.functions; prepare; {end}")
    assert [name for name in ("secrets.sh", "ssh") if (attempt_dir / name).exists()] == left


def test_script_waits_for_secrets_that_a_requeue_needs_again(attempt_dir: Path) -> None:
    # Each call of sleep is two seconds for the script; the file appears after the third.
    add_program(
        attempt_dir,
        "sleep",
        'echo >>"$HOME/slept"; (($(wc -l <"$HOME/slept") < 3)) || : >secrets.sh',
    )
    script = ". ./batch.functions; has_secrets=1; prepare; wait_for_secrets; echo outcome=$outcome"
    assert "outcome=\n" in run_bash(attempt_dir, script).stdout
    (attempt_dir / "secrets.sh").unlink(missing_ok=True)
    add_program(attempt_dir, "sleep", "exit 0")
    script = ". ./batch.functions; has_secrets=1; prepare; SECONDS=0; wait() { SECONDS=400; }; wait_for_secrets; echo outcome=$outcome"
    assert "outcome=failed" in run_bash(attempt_dir, script).stdout
    assert "secrets are not in" in (attempt_dir / "logs" / "w-0.log").read_text()
