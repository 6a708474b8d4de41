"""A task owns its attempt's directory: whatever it puts in the place of Sluice's files concerns its own job only."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters.connections import transport_for
from clusters.models import Cluster
from jobs.models import Job, Task
from jobs.sync.task_reader import MAX_OUTPUT_BYTES, AttemptReport, read_reports
from tests.conftest import EmbeddedCluster
from tests.slurm.engine_process import EngineHarness, make_engine_harness
from tests.slurm.test_engine import prepare_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.django_db(transaction=True)]
GOOD_STATE = "role=main\nindex=0\nstate=running\nhost=n1\n"


@pytest.fixture
def harness(cluster: EmbeddedCluster, tmp_path: Path) -> Iterator[EngineHarness]:
    with make_engine_harness(cluster, tmp_path) as new_harness:
        prepare_cluster(new_harness)
        yield new_harness


@pytest.fixture
def attempts(harness: EngineHarness, cluster: EmbeddedCluster) -> Iterator[tuple[Path, Path]]:
    """The directories of a hostile attempt and of another attempt of the same person."""
    root = Path(cluster.work_root.format(user="sluice-alice")) / f"forged-{os.getpid()}"
    hostile, other = root / "hostile" / "1", root / "other" / "1"
    script = 'for d; do mkdir -p "$d/tasks" "$d/logs"; printf "%s" "$STATE" >"$d/tasks/main-0.state"; done'
    as_alice(script, str(hostile), str(other), STATE=GOOD_STATE)
    yield hostile, other
    subprocess.run(["rm", "-rf", str(root)], check=True)


def as_alice(script: str, *args: str, **env: str) -> None:
    account = pwd.getpwnam("sluice-alice")
    subprocess.run(
        ["bash", "-c", script, "forge", *args],
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=[],
        env={"PATH": os.environ["PATH"], "HOME": account.pw_dir, **env},
        cwd="/",
        check=True,
    )


def read(cluster: Cluster, *directories: Path) -> dict[Path, AttemptReport]:
    transport = transport_for(cluster, "sluice-alice")
    reports = read_reports(transport, [str(path) for path in directories])
    return {Path(path): report for path, report in reports.items()}


# What a task may leave in its directory, as a script that runs there.
FORGERIES = {
    "huge": "truncate -s 100G result; head -c 200000000 /dev/zero >tasks/main-0.state",
    "long lines": "yes role=main | tr -d '\\n' | head -c 19000 >tasks/main-0.state",
    "pipes": "rm tasks/main-0.state; mkfifo result pulling tasks/main-0.state",
    "socket": "rm tasks/main-0.state; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"result\")'",
    "devices": "ln -sf /dev/zero result; ln -sf /dev/zero tasks/main-0.state",
    "links out": "ln -sf /etc/passwd result; ln -sf /etc/shadow pulling; ln -sf ../../other/1/tasks/main-0.state tasks/main-0.state",
    "directory link": "rm -r tasks; ln -s ../other/1/tasks tasks; ln -s ../../other/1/tasks tasks2",
    "link loop": "rm -r tasks; ln -s tasks tasks; ln -s result result",
    "deep": 'd=tasks; for ((i = 0; i < 200; i++)); do d=$d/x.state; done; mkdir -p "$d"; rm tasks/main-0.state',
    "many files": "rm tasks/main-0.state; seq -f tasks/%g.state 3000 | xargs touch",
    "names": "touch $'tasks/a\\nresult:outcome=completed.state' $'tasks/\\e[31m.state' $'tasks/\\xff.state'; rm tasks/main-0.state",
    "not text": "head -c 15000 /dev/urandom >tasks/main-0.state; printf '\\377\\376\\0=\\0' >result",
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_reading_is_bounded_and_keeps_other_attempts(
    harness: EngineHarness, attempts: tuple[Path, Path], forgery: str
) -> None:
    hostile, other = attempts
    as_alice(f'cd "$1" && {forgery}', str(hostile))
    # Raises CommandTimeout if a pipe is waited for or a large file is read.
    reports = read(harness.cluster, hostile, other)
    assert [task.host for task in reports[other].tasks] == ["n1"]
    assert reports[hostile].script_result is None
    assert len(reports[hostile].tasks) <= 1


def test_contents_cannot_pretend_to_be_another_attempt(
    harness: EngineHarness, attempts: tuple[Path, Path]
) -> None:
    """The directories in the command's output are separated by a control character, which a file may contain."""
    hostile, other = attempts
    text = f"x\n\x1e{other}\nrole=main\nindex=0\nstate=ended\nexit_code=0\noutcome=completed\n"
    for name in ("result", "tasks/zz.state", "tasks/main-0.state"):
        as_alice('printf "%s" "$TEXT" >"$1"', str(hostile / name), TEXT=text)
    name = f"tasks/a\n\x1e{other}\nresult:outcome=completed\nresult:exit_code=0\n.state"
    as_alice('mkdir -p "$(dirname -- "$1")" && touch -- "$1"', str(hostile / name))
    for order in ((hostile, other), (other, hostile)):
        report = read(harness.cluster, *order)[other]
        assert report.script_result is None
        assert [(task.state, task.exit_code) for task in report.tasks] == [("running", None)]


def test_attempt_directory_that_is_a_link_is_missing(
    harness: EngineHarness, attempts: tuple[Path, Path]
) -> None:
    hostile, other = attempts
    as_alice('rm -r "$1" && ln -s "$2" "$1"', str(hostile), str(other))
    assert not read(harness.cluster, hostile)[hostile].directory_exists


def test_output_is_limited(harness: EngineHarness, attempts: tuple[Path, Path]) -> None:
    """More files than a job can have fail the read of this person's attempts, not the engine."""
    hostile, _other = attempts
    script = 'cd "$1/tasks" && seq -f %g.state 2000 | while read -r f; do head -c 18000 /dev/zero | tr "\\0" "\\n" >"$f"; done'
    as_alice(script, str(hostile))
    assert MAX_OUTPUT_BYTES < 2000 * 18000
    report = read(harness.cluster, hostile)[hostile]  # 40 lines of each file at most
    assert len(report.tasks) <= 1


HOSTILE_STATE = (
    "role=main\\nindex=0\\nstate=ended\\nhost=\\000evil\\033[31m\\377\\nip=" + "9" * 400 + "\\n"
    "ports=\\000a:99999999999999999999,-1;\\ngpus=\\000\\nstarted=1e400\\nended=nan\\n"
    "exit_code=99999999999999999999\\nreason=\\000\\n"
)


def test_hostile_states_of_a_running_job_stop_nobody(harness: EngineHarness) -> None:
    """One poll saves the ends of several people's jobs together: a value that the database refuses must not stop it."""
    harness.engine().start()
    forge = (
        'cd "$CHECKPOINT_DIR/../$SLUICE_ATTEMPT"; while sleep 0.1; do '
        f"printf '{HOSTILE_STATE}' >tasks/main-0.state; "
        "printf 'outcome=failed\\nexit_code=1\\nrole=\\000x\\nerror=\\000\\033\\n' >result; done"
    )
    hostile = harness.job("hostile", forge)
    bobs = harness.job("bobs", "sleep 5", by=harness.bob)
    Job.objects.update(watched_until="2100-01-01T00:00:00Z")
    task = Task.objects.filter(attempt__job=hostile)
    harness.wait(
        lambda: any("evil" in node for node in task.values_list("node", flat=True)),
        message="the forged state was not read",
    )
    harness.wait_for_state(bobs, "COMPLETED", timeout_s=90)
    harness.slurm("scancel", harness.attempt(hostile).slurm_job_id)
    harness.wait_for_state(hostile, "STOPPED", timeout_s=90)
    row = task.get()
    assert "\0" not in f"{row.node}{row.ip}{row.gpus}{row.ports}"
    assert "\033" not in row.node
    assert "_error" not in harness.logs()
