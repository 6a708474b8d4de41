"""Fields of the job file take effect in real tasks; fields with tests of their own are in the other modules."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.batch_harness import USER, BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster


def run_job(
    harness: BatchHarness,
    job: dict[str, Any],
    storages: dict[str, str] | None = None,
    **role: Any,
) -> SubmittedAttempt:
    roles = [{"name": "w", "command": "true", **role}]
    submitted = harness.submit({**job, "taskRoles": roles}, storages=storages or {})
    submitted.wait_for_end(120)
    return submitted


@pytest.mark.proves(
    "jobName", "taskRoles", "taskRoles[].name", "taskRoles[].command", "taskRoles[].parameters",
    "taskRoles[].parameters[].key", "taskRoles[].parameters[].value",
)  # fmt: skip
def test_command_gets_arguments_in_order(batch_harness: BatchHarness) -> None:
    job = run_job(
        batch_harness,
        {"jobName": "arguments"},
        command="echo \"$PAI_JOB_NAME $PAI_CURRENT_TASK_ROLE_NAME\"; printf '<%s>' ",
        parameters=[{"key": "lr", "value": "0.1"}, {"key": "text", "value": "it's `a` $b"}],
    )
    assert job.slurm() == ("COMPLETED", "0:0")
    assert job.log_text("w") == "arguments w\n<--lr=0.1><--text=it's `a` $b>"
    assert job.command("squeue", "-ht", "all", "-o", "%j", "-j", job.slurm_job_id) == "arguments"


@pytest.mark.proves("taskRoles[].preCommands", "taskRoles[].postCommands")
def test_commands_before_and_after_run_in_order(batch_harness: BatchHarness) -> None:
    job = run_job(
        batch_harness,
        {},
        preCommands=["echo before"],
        command="echo command",
        postCommands=["echo after"],
    )
    assert job.log_text("w") == "before\ncommand\nafter\n"
    failing = run_job(batch_harness, {}, preCommands=["false", "echo unreached"])
    assert failing.slurm() == ("FAILED", "1:0")
    assert failing.log_text("w") == ""


@pytest.mark.proves("taskRoles[].strictShell")
@pytest.mark.parametrize(("strict", "expected"), [(True, "FAILED"), (False, "COMPLETED")])
def test_strict_shell_stops_at_the_first_failing_line(
    batch_harness: BatchHarness, strict: bool, expected: str
) -> None:
    job = run_job(batch_harness, {}, strictShell=strict, command="false\necho reached")
    assert job.slurm()[0] == expected
    assert ("reached" in job.log_text("w")) is not strict


@pytest.mark.proves("jobEnvs", "taskRoles[].env")
def test_variables_of_the_role_override_the_job(batch_harness: BatchHarness) -> None:
    job = run_job(
        batch_harness,
        {"jobEnvs": {"ONE": "job", "TWO": "job", "PAI_JOB_NAME": "forged"}},
        env={"TWO": "role"},
        command='echo "$ONE $TWO $PAI_JOB_NAME"',
    )
    assert job.log_text("w") == "job role t\n"


@pytest.mark.proves(
    "mounts", "mounts[].name", "mounts[].source", "mounts[].target", "mounts[].readOnly"
)  # fmt: skip
def test_mounts_are_writable_or_read_only(batch_harness: BatchHarness) -> None:
    directory = Path(batch_harness.root, "mounted")
    subprocess.run(["runuser", "-u", USER, "--", "mkdir", "-p", str(directory)], check=True)
    job = run_job(
        batch_harness,
        {
            "mounts": [
                {"source": str(directory), "target": "/mnt/rw"},
                {"name": "team", "target": "/mnt/ro", "readOnly": True},
            ]
        },
        storages={"team": str(directory)},
        command="echo text >/mnt/rw/file && cat /mnt/ro/file; touch /mnt/ro/other || echo denied",
    )
    assert job.log_text("w").splitlines()[0] == "text"
    assert job.log_text("w").splitlines()[-1] == "denied"


@pytest.mark.proves("dataDir")
def test_data_directory_is_read_only_at_dataset(batch_harness: BatchHarness) -> None:
    directory = Path(batch_harness.root, "data")
    script = 'mkdir -p "$1" && echo 1 >"$1/item"'
    subprocess.run(
        ["runuser", "-u", USER, "--", "sh", "-c", script, "sh", str(directory)], check=True
    )
    job = run_job(
        batch_harness,
        {"dataDir": str(directory)},
        command='cat /dataset/item "$DATA_DIR/item" "$PAI_DATA_DIR/item"; touch /dataset/x || echo denied',
    )
    assert job.log_text("w").splitlines()[:3] == ["1", "1", "1"]
    assert job.log_text("w").splitlines()[-1] == "denied"


@pytest.mark.proves(
    "taskRoles[].portList", "taskRoles[].portList[].label", "taskRoles[].portList[].portNumber",
)  # fmt: skip
def test_ports_are_free_and_named_by_label(batch_harness: BatchHarness) -> None:
    job = run_job(
        batch_harness,
        {},
        portList=[{"label": "data", "portNumber": 3}],
        command='echo "$PAI_PORT_LIST_w_0_data"',
    )
    state = job.state("w")
    assert state is not None
    assert len(state.ports["data"]) == 3
    assert job.log_text("w").strip() == ",".join(map(str, state.ports["data"]))


@pytest.mark.proves(
    "taskRoles[].taskNumber", "taskRoles[].cpuNumber", "taskRoles[].memoryMB",
    "taskRoles[].gpuNumber", "taskRoles[].gpuType", "gpuType", "placement", "taskRoles[].placement",
)  # fmt: skip
def test_slurm_allocates_the_resources_of_the_job(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit(
        {
            "gpuType": "a100",
            "placement": "separate",
            "taskRoles": [
                {
                    "name": "w", "taskNumber": 2, "cpuNumber": 2, "memoryMB": 600, "gpuNumber": 1,
                    "placement": "separate", "command": "true",
                },
                {"name": "v", "gpuNumber": 1, "gpuType": "v100", "command": "true"},
            ],
        }
    )  # fmt: skip
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    text = job.command("scontrol", "-o", "show", "job", job.slurm_job_id)
    tres = [
        dict(re.findall(r"([\w/:]+)=(\w+)", re.search(r" TRES=(\S+)", line)[1]))
        for line in text.splitlines()
    ]
    wanted = {"cpu": "4", "node": "2", "mem": "1200M", "gres/gpu:a100": "2"}
    assert wanted.items() <= tres[0].items(), tres
    assert {"cpu": "1", "node": "1", "gres/gpu:v100": "1"}.items() <= tres[1].items(), tres
    hosts = {state.host for state in (job.state("w", 0), job.state("w", 1)) if state}
    assert len(hosts) == 2


@pytest.mark.proves("taskRoles[].image")
def test_roles_run_in_their_own_images(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit(
        {
            "image": "busybox",
            "taskRoles": [
                {"name": "a", "command": "ls /bin/busybox"},
                {"name": "b", "image": "python", "command": "ls /usr/bin/python3"},
            ],
        }
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert (job.log_text("a"), job.log_text("b")) == ("/bin/busybox\n", "/usr/bin/python3\n")


@pytest.mark.proves("secrets")
def test_secrets_are_variables_of_the_tasks(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit(
        {"secrets": ["TOKEN"], "taskRoles": [{"name": "w", "command": 'echo "<$TOKEN>"'}]},
        secrets={"TOKEN": "it's 4711"},
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("w") == "<it's 4711>\n"
    for file in (job.paths.batch_script, job.paths.batch_log):
        assert "4711" not in Path(file).read_text()
