"""The directories of a job on the embedded cluster: results, models, code that is copied, URIs and variables in paths."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.script.directories import MAX_CODE_MIB
from tests.slurm.batch_harness import USER, BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster


def role(command: str, **more: Any) -> dict[str, Any]:
    return {"name": "w", "command": command, **more}


@pytest.fixture
def directory(batch_harness: BatchHarness) -> Iterator[Path]:
    """A directory of the job's owner, outside the directories of jobs."""
    created = Path(batch_harness.root).parent / f"directories-{os.getpid()}"
    created.mkdir(parents=True)
    give_to_owner(created)
    yield created
    shutil.rmtree(created)


def give_to_owner(directory: Path) -> None:
    account = pwd.getpwnam(USER)
    for entry in (directory, *directory.rglob("*")):
        os.chown(entry, account.pw_uid, account.pw_gid, follow_symlinks=False)


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file with its mode, time of change and content."""
    return {
        str(path.relative_to(directory)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            os.readlink(path).encode() if path.is_symlink() else path.read_bytes(),
        )
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def run(harness: BatchHarness, job: dict[str, Any], **more: Any) -> SubmittedAttempt:
    submitted = harness.submit(job, **more)
    assert submitted.wait_for_end() == ("COMPLETED", "0:0"), submitted.log_text("w")
    return submitted


@pytest.mark.proves("outputDir")
def test_results_are_kept_per_job_and_shared_by_its_attempts(batch_harness: BatchHarness) -> None:
    command = 'test "$RESULT_DIR" = "$PAI_OUTPUT_DIR" && echo "$SLUICE_ATTEMPT" >>"$PAI_OUTPUT_DIR/result" && cat "$RESULT_DIR/result"'
    job = {"jobName": "same-name", "taskRoles": [role(command)]}
    first = run(batch_harness, job)
    again = run(batch_harness, job, attempt_of=first)
    other = run(batch_harness, job)
    assert again.log_text("w").split() == ["1", "2"]
    assert other.log_text("w").split() == ["1"]
    assert Path(first.paths.output_dir, "result").read_text() == "1\n2\n"


@pytest.mark.proves("modelDir")
@pytest.mark.parametrize("named", [False, True], ids=["octopus", "modelDir"])
@pytest.mark.proves("modelDir")
def test_model_directory_exists_and_is_kept(
    batch_harness: BatchHarness, directory: Path, named: bool
) -> None:
    fields = {"modelDir": f"{directory}/new/models"} if named else {"importedFrom": "octopus"}
    command = 'echo weights >/model/save.pth && cat "$MODEL_DIR/save.pth"'
    job = run(batch_harness, {**fields, "taskRoles": [role(command)]})
    assert job.log_text("w") == "weights\n"
    kept = directory / "new" / "models" if named else Path(job.paths.model_dir)
    assert (kept / "save.pth").read_text() == "weights\n"


@pytest.mark.proves("codeDir")
def test_code_directory_is_copied_and_its_source_is_not_changed(
    batch_harness: BatchHarness, directory: Path
) -> None:
    code = directory / "my code"
    (code / "package").mkdir(parents=True)
    (code / ".hidden").write_text("hidden\n")
    (code / "package" / "data").write_text("original\n")
    (code / "package" / "data").chmod(0o444)
    (directory / "shared").write_text("shared\n")
    (code / "package" / "inside").symlink_to("../.hidden")
    (code / "package" / "outside").symlink_to("../../shared")
    (code / "absolute").symlink_to(code / "package" / "data")
    (code / "dangling").symlink_to("gone")
    give_to_owner(directory)
    (code / "package").chmod(0o555)
    before = snapshot(code)
    command = """
        test "$PWD" = "$PAI_CODE_DIR" && test "$PWD" = "$PAI_WORK_DIR" || exit 1
        cat /code/.hidden package/inside package/outside absolute && readlink dangling || exit 2
        chmod +w package/data && echo "changed by $PAI_TASK_INDEX" >>absolute && echo $SLUICE_ATTEMPT >new && rm .hidden
    """
    fields = {
        "codeDir": str(code),
        "mounts": [{"source": str(directory), "target": str(directory), "readOnly": True}],
        "taskRoles": [role(command)],
    }
    one, other = run(batch_harness, fields), run(batch_harness, fields)
    assert one.log_text("w") == other.log_text("w") == "hidden\nhidden\nshared\noriginal\ngone\n"
    copy = Path(one.paths.code_dir)
    assert (copy / "package" / "data").read_text() == "original\nchanged by 0\n"
    assert (copy / "new").read_text() == "1\n"
    assert snapshot(code) == before
    # The owner can delete the copy although its source has a directory that is not writable.
    one.command("rm", "-r", str(copy))


def test_requeued_attempt_keeps_its_copy_of_the_code(
    batch_harness: BatchHarness, directory: Path
) -> None:
    (directory / "count").write_text("")
    give_to_owner(directory)
    job = run(
        batch_harness,
        {"codeDir": str(directory), "taskRoles": [role("echo ran >>count; wc -l <count")]},
    )
    job.command(
        "sbatch", "--wait", job.paths.batch_script
    )  # as after a requeue, in the same directory
    assert job.log_text("w").split() == ["1", "2"]


def test_too_large_code_directory_fails_the_job_with_its_size(
    batch_harness: BatchHarness, directory: Path
) -> None:
    with (directory / "big").open("wb") as file:
        file.truncate((MAX_CODE_MIB + 1) * 2**20)
    give_to_owner(directory)
    job = batch_harness.submit({"codeDir": str(directory), "taskRoles": [role("echo ran")]})
    assert job.wait_for_end() == ("FAILED", "210:0")
    result = job.script_result()
    assert (result.reason, result.error) == ("code_too_large", str(MAX_CODE_MIB + 2))
    assert result.is_permanent
    assert f"has {MAX_CODE_MIB + 2} MB; at most {MAX_CODE_MIB} MB" in job.log_text("w")
    assert "ran" not in job.log_text("w")
    assert not Path(job.paths.code_dir).exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_unreadable_code_fails_the_job_with_the_error(
    batch_harness: BatchHarness, directory: Path, kind: str
) -> None:
    private = directory / "private"
    private.mkdir() if kind == "directory" else private.write_text("x")
    give_to_owner(directory)
    os.chown(private, 0, 0)
    private.chmod(0o700)
    job = batch_harness.submit({"codeDir": str(directory), "taskRoles": [role("echo ran")]})
    assert job.wait_for_end() == ("FAILED", "211:0")
    result = job.script_result()
    assert result.reason == "code_failed"
    assert str(private) in result.error
    assert "Permission denied" in result.error
    assert not Path(job.paths.code_dir).exists()


@pytest.mark.proves("outputDir")
def test_uris_and_variables_in_paths_lead_to_directories(
    batch_harness: BatchHarness, directory: Path
) -> None:
    (directory / "hdfs" / "sets").mkdir(parents=True)
    (directory / "hdfs" / "sets" / "train").write_text("data\n")
    give_to_owner(directory)
    job = run(
        batch_harness,
        {
            "jobName": "digits",
            "dataDir": "hdfs://namenode:9000/sets",
            "outputDir": "$PAI_DEFAULT_FS_URI/$PAI_USER_NAME/$PAI_JOB_NAME-$PAI_TASK_ROLE_COUNT/$RUN",
            "jobEnvs": {"RUN": "run-7"},
            "taskRoles": [role('cat /dataset/train && cp /dataset/train "$RESULT_DIR/out"')],
        },
        fs_uri=str(directory),
        storages={"hdfs://namenode:9000": f"{directory}/hdfs"},
    )
    assert job.log_text("w") == "data\n"
    assert (directory / USER / "digits-1" / "run-7" / "out").read_text() == "data\n"
