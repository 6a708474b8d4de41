"""`manage.py render`: prints plan and batch script of a job file without a cluster."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

JOB = {
    "jobName": "mnist",
    "image": "tensorflow/tensorflow:2.16",
    "taskRoles": [
        {"name": "ps", "command": "python ps.py"},
        {
            "name": "worker",
            "taskNumber": 2,
            "gpuNumber": 1,
            "gpuType": "a100",
            "command": "python w.py",
        },
    ],
}


def run(tmp_path: Path, job: dict[str, object], *arguments: str) -> tuple[str, str]:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job))
    out, err = StringIO(), StringIO()
    call_command("render", str(file), *arguments, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


@pytest.mark.django_db
def test_plan_and_script_are_printed_without_a_cluster(tmp_path: Path) -> None:
    out, err = run(tmp_path, JOB, "--runtime", "enroot", "--user", "alice")
    assert "1 node of example: 1 × ps (1 CPU, 100 MB), 2 × worker" in out
    assert "#SBATCH --job-name=mnist" in out
    assert "enroot import" in out
    assert "example cluster" in err


@pytest.mark.django_db
def test_all_option_prints_every_file_of_the_attempt(tmp_path: Path) -> None:
    out, _ = run(tmp_path, JOB, "--all")
    for path in ("batch.sh", "task.sh", "enter.sh", "roles.sh"):
        assert f"======== {path}\n" in out


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("job", "arguments", "message"),
    [
        ({**JOB, "jobNam": "x"}, (), "jobNam"),
        ({**JOB, "jobEnvs": {"UID": "1"}}, (), "reserved by the shell"),
        (JOB, ("--namespace", "nowhere"), "There is no namespace nowhere"),
    ],
)
def test_invalid_jobs_raise_command_errors(
    tmp_path: Path, job: dict[str, object], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        run(tmp_path, job, *arguments)
