"""Rendered scripts compared with golden files, image resolution, and parsing of task state and result files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from jobs.script.images import ResolvedImage, resolve_image
from jobs.script.render import RUNTIMES, RenderError, RenderOptions, Runtime
from jobs.script.task_state import parse_script_result, parse_task_state
from tests.unit.jobs.rendering import render_job

GOLDEN = Path(__file__).parent / "golden"
SHELL = Path(__file__).parents[3] / "jobs" / "script" / "shell"

PS = {"name": "ps", "memoryMB": 2048, "command": "python ps.py"}
WORKER = {
    "name": "worker",
    "taskNumber": 2,
    "cpuNumber": 4,
    "memoryMB": 16384,
    "gpuNumber": 1,
    "gpuType": "a100",
    "command": "python train.py",
    "parameters": [{"key": "lr", "value": "0.1"}, {"key": "note", "value": "it's $5; `ls`"}],
    "portList": [{"label": "grpc", "portNumber": 2}],
    "minSucceededTaskCount": 2,
}
COMMON = {
    "jobName": "mnist",
    "image": "tensorflow/tensorflow:2.16",
    "codeDir": "~/mnist",
    "dataDir": "/data/mnist",
    "outputDir": "$PAI_DEFAULT_FS_URI/results/$PAI_JOB_NAME",
    "mounts": [{"source": "/data/shared", "target": "/shared", "readOnly": True}],
    "jobEnvs": {"GREETING": "it's $HOME"},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "simple": {**COMMON, "framework": "pytorch", "taskRoles": [WORKER]},
    "packed": {**COMMON, "framework": "tensorflow", "taskRoles": [PS, WORKER]},
    "het": {**COMMON, "placement": "separate", "taskRoles": [PS, WORKER]},
}
CHIEF = {**PS, "name": "chief", "memoryMB": 1000}


def join_files(files: dict[str, str], *, variables: bool) -> str:
    """Concatenate all files; replace the content of constant files by their paths."""
    parts = []
    for path, text in files.items():
        if path == "roles.sh" and not variables:
            # The variables are the same for every runtime; one golden file contains them.
            text = re.sub(r"(?s)role_variables\(\) \{\n.*?\n\}\n", "role_variables() { … }\n", text)
        constant = SHELL / path
        body = constant.read_text() if constant.exists() else ""
        shown = text.replace(body, f"(here follows jobs/script/shell/{path})\n") if body else text
        parts.append(f"======== {path}\n{shown}")
    return "\n".join(parts)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rendered_files_equal_the_golden_file(layout: str, runtime: str) -> None:
    """SLUICE_UPDATE_GOLDEN=1 rewrites the golden files; review the diff before committing."""
    shown = (layout, runtime) == ("packed", "apptainer")
    text = join_files(render_job(LAYOUTS[layout], runtime=runtime), variables=shown)
    file = GOLDEN / f"{layout}-{runtime}.txt"
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def render_step(job: dict[str, Any], **options: Any) -> tuple[str, str]:
    """The step_roles line and the options of the only step."""
    text = render_job(job, **options)["batch.sh"]
    roles = re.search(r"^step_roles=(\S+)", text, re.MULTILINE)
    assert roles is not None
    (step,) = re.findall(r"^      options=\((--.*)\)$", text, re.MULTILINE)
    return roles[1], step


def test_equal_roles_of_an_mpi_program_share_a_step() -> None:
    worker = {**CHIEF, "name": "worker", "taskNumber": 3}
    job = {**COMMON, "framework": "mpi", "taskRoles": [worker, CHIEF]}
    steps, options = render_step(job, mpi="pmix")
    assert steps == "(1,0)"  # the chief has rank 0
    assert options == (
        "--exact --ntasks=4 --cpus-per-task=1 --mem-per-cpu=1000M --gres=none --mpi=pmix "
        '--input="/dev/fd/${go_pipe[1]}"'
    )
    assert "#SBATCH --ntasks=4\n" in render_job(job)["batch.sh"]


def test_unequal_roles_of_an_mpi_program_are_components_of_one_step() -> None:
    worker = {**CHIEF, "name": "worker", "taskNumber": 3, "cpuNumber": 2}
    job = {**COMMON, "framework": "mpi", "taskRoles": [worker, CHIEF]}
    steps, options = render_step(job)
    assert steps == "(1,0)"
    first, second = options.split(" : ")
    assert first.startswith("--het-group=0 --exact --ntasks=1 ")
    assert second.startswith("--het-group=1 --exact --ntasks=3 --cpus-per-task=2 ")
    assert first.endswith('--input="/dev/fd/${go_pipe[1]}"')
    assert second.endswith('--input="/dev/fd/${go_pipe[0]}"')


def test_empty_mpi_setting_means_the_default_of_slurm() -> None:
    job = {**COMMON, "framework": "mpi", "taskRoles": [{**CHIEF, "name": "worker"}]}
    assert "--mpi" not in render_step(job)[1]
    assert "--mpi=pmi2 " in render_step(job, mpi="pmi2")[1]
    for other in ({"framework": {"name": "mpi", "strategy": "hostfile"}}, {"framework": "pytorch"}):
        assert "--mpi=none " in render_step({**job, **other}, mpi="pmix")[1]


def test_pyxis_refuses_different_images_in_one_mpi_program() -> None:
    worker = {**CHIEF, "name": "worker", "image": "other:1"}
    job = {**COMMON, "framework": "mpi", "taskRoles": [CHIEF, worker]}
    with pytest.raises(RenderError, match="Give these roles the same image"):
        render_job(job, runtime="pyxis")
    render_job(job, runtime="apptainer")


def test_rendering_is_deterministic() -> None:
    first, second = (render_job(LAYOUTS["packed"]) for _ in range(2))
    assert first == second


def test_script_length_is_independent_of_task_count() -> None:
    def count_lines(tasks: int) -> dict[str, int]:
        roles = [{**WORKER, "name": "worker", "taskNumber": tasks, "gpuNumber": 0}]
        job = {**COMMON, "framework": "pytorch", "taskRoles": roles}
        return {path: text.count("\n") for path, text in render_job(job).items()}

    assert count_lines(2) == count_lines(32)


def test_job_is_rendered_to_four_files() -> None:
    """`build_attempt_files` adds job.json and logs/.keep: six files per attempt."""
    assert sorted(render_job(LAYOUTS["packed"])) == [
        "batch.sh",
        "enter.sh",
        "roles.sh",
        "task.sh",
    ]


def test_enroot_rejects_paths_with_spaces() -> None:
    job = {**LAYOUTS["simple"], "dataDir": "/data/my files"}
    with pytest.raises(RenderError, match="/data/my files"):
        render_job(job, runtime="enroot")
    assert "'/data/my files'" in render_job(job, runtime="apptainer")["roles.sh"]


def test_short_jobs_request_no_signal_before_the_time_limit() -> None:
    long, short = (
        render_job({**LAYOUTS["simple"], "timeLimit": limit})["batch.sh"] for limit in ("1h", "4m")
    )
    assert "--signal=B:USR1@30" in long
    assert "--signal" not in short.split("# ----")[0]


@pytest.mark.parametrize(
    ("name", "runtime", "expected"),
    [
        ("/i/x.sif", "apptainer", ResolvedImage("/i/x.sif")),
        ("tf", "apptainer", ResolvedImage("/images/tensorflow.sif")),
        ("busybox", "apptainer", ResolvedImage("/images/busybox.sif")),
        ("busybox.sif", "singularity", ResolvedImage("/images/busybox.sif")),
        ("org/app:1.0", "apptainer", ResolvedImage("/images/org_app_1.0.sif")),
        ("docker://org/app:1.0", "apptainer", ResolvedImage("/images/org_app_1.0.sif")),
        ("gone.sif", "apptainer", ResolvedImage("/images/gone.sif")),
        ("org/x:2", "apptainer", ResolvedImage("~/c/org_x_2.sif", "docker://org/x:2")),
        ("oras://r/x", "apptainer", ResolvedImage("~/c/oras___r_x.sif", "oras://r/x")),
        (
            "nvcr.io/nv/pt:1",
            "enroot",
            ResolvedImage("~/c/nvcr.io_nv_pt_1.sqsh", "docker://nvcr.io#nv/pt:1"),
        ),
        ("org/x:2", "pyxis", ResolvedImage("~/c/org_x_2.sqsh", "docker://org/x:2")),
    ],
)
def test_image_name_resolves_to_a_file_or_a_registry_image(
    name: str, runtime: Runtime, expected: ResolvedImage
) -> None:
    options = RenderOptions(
        runtime=runtime,
        images_dir="/images",
        image_files=frozenset({"busybox.sif", "org_app_1.0.sif", "tensorflow.sif"}),
        image_aliases={"tf": "/images/tensorflow.sif"},
        image_cache_dir="~/c",
    )
    assert resolve_image(name, options) == expected


def test_task_state_and_script_result_are_parsed_or_rejected() -> None:
    state = parse_task_state(
        "role=a.b\nindex=3\nrestart_count=1\nstate=ended\nhost=n1\nip=10.0.0.1\nports=http:1;x:2,3;\n"
        "gpus=0,1\nstep=2\npid=77\nlog_offset=5\nstarted=1.5\nended=2.5\nexit_code=137\nsignal=9\nreason=out_of_memory\n"
    )
    assert (state.role, state.index, state.restart_count, state.signal) == ("a.b", 3, 1, 9)
    assert state.ports == {"http": (1,), "x": (2, 3)}
    assert state.gpus == ("0", "1")
    result = parse_script_result(
        "outcome=failed\nrule=start\nrole=w\nindex=0\nexit_code=201\nreason=image_missing\n"
    )
    assert result.is_permanent
    assert result.exit_code == 201
    for broken in ("", "role=x\n", "outcome=maybe\nexit_code=0\n"):
        with pytest.raises(ValueError, match="not a"):
            parse_task_state(broken)
        with pytest.raises(ValueError, match="not a"):
            parse_script_result(broken)


def test_last_complete_block_of_a_state_file_counts() -> None:
    """Scripts append a block for each state; a reader may see the last one in part."""
    running = "begin\nrole=w\nindex=0\nstate=running\npid=7\nend\n"
    ended = "begin\nrole=w\nindex=0\nstate=ended\nexit_code=3\nend"
    assert parse_task_state(running).state == "running"
    state = parse_task_state(running + ended)
    assert (state.state, state.exit_code, state.pid) == ("ended", 3, None)
    for cut in range(1, len(ended)):
        assert parse_task_state(running + ended[:cut]).state == "running", ended[:cut]
        with pytest.raises(ValueError, match="not a"):
            parse_task_state(ended[:cut])
    assert parse_task_state(f"{running}end\n").state == "running"
