"""Paths of a job file on the cluster: variables, URIs, and the directories of a job."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.jobfile import JobSpec
from jobs.script.directories import Bind, resolve_directories
from jobs.script.job_paths import JobIdentity, find_path_problems, resolve_paths
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderError, RenderOptions

ALICE = JobIdentity("alice", "0a1b", 2)
JOB = "/scratch/jobs/0a1b"
SITE = RenderOptions(
    fs_uri="/shared/",
    storages={
        "team": "/data/team",
        "hdfs://nn:9000": "/data/hdfs",
        "hdfs://nn:9000/home/": "~/$USER/hdfs",
        "s3://": "/data/$PAI_NOTHING",
    },
)


def make_spec(**fields: Any) -> JobSpec:
    role = {"name": "w", "taskNumber": 2, "command": "true"}
    return JobSpec.model_validate({"jobName": "mnist", "taskRoles": [role], **fields})


def resolve(path: str, **fields: Any) -> str:
    return resolve_paths(make_spec(dataDir=path, **fields), ALICE, options=SITE).data_dir


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("", ""),
        ("/data/x", "/data/x"),
        ("~", "~"),
        ("~/x", "~/x"),
        ("data/x", "~/data/x"),
        ("$HOME", "~"),
        ("${HOME}/x", "~/x"),
        ("$PAI_DEFAULT_FS_URI/$PAI_USERNAME/${PAI_JOB_NAME}x", "/shared/alice/mnistx"),
        ("/d/$PAI_USER_NAME-$USER/$PAI_VIRTUAL_CLUSTER", "/d/alice-alice/default"),
        ("/d/$PAI_TASK_ROLE_COUNT/$PAI_TASK_ROLE_TASK_COUNT_w", "/d/1/2"),
        ("/d/$TRAINING_ID/$SLUICE_ATTEMPT", "/d/0a1b/2"),
        ("$ROOT/${SEED}", "/corpus/7"),
        ("/d/a$/b", "/d/a$/b"),
        ("hdfs://nn:9000/a/b", "/data/hdfs/a/b"),
        ("hdfs://nn:9000", "/data/hdfs"),
        ("hdfs://nn:9000/home/x", "~/alice/hdfs/x"),
        ("file:///data/x", "/data/x"),
        ("file:/data/x", "/data/x"),
        ("file://localhost/data/x", "/data/x"),
    ],
)
def test_paths_are_resolved(path: str, expected: str) -> None:
    assert resolve(path, jobEnvs={"ROOT": "/corpus", "SEED": 7}) == expected


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("$PAI_HOST_IP_w_0/x", "path_variable"),  # known only when the job runs
        ("/d/$PAI_CURRENT_TASK_ROLE_NAME", "path_variable"),  # differs between roles
        ("$PAI_OUTPUT_DIR/x", "path_variable"),  # a path itself
        ("$PAI_USER_NAMES/x", "path_variable"),
        ("/d/$HOME", "path_variable"),
        ("/d/${x", "path_variable"),
        ("/d/${}", "path_variable"),
        ("$EMPTY/x", "path_variable"),  # must not become /x
        ("/d/$LINES", "path_control"),
        ("~bob/x", "path_home"),
        ("hdfs://other:9000/x", "path_uri"),
        ("hdfs://nn:90001/x", "path_uri"),
        ("hdfs:/x", "path_uri"),
        ("HTTPS://example.org/x", "path_uri"),
        ("team://x", "path_uri"),
        ("file://nn/x", "path_uri"),
        ("s3://bucket/x", "path_variable"),
        ("/d/a:b", "mount_path"),
        ("/d/$COMMA", "mount_path"),
    ],
)
def test_other_paths_are_refused(path: str, code: str) -> None:
    fields = {"jobEnvs": {"EMPTY": "", "LINES": "a\nb", "COMMA": "a,b"}}
    (problem,) = find_path_problems(make_spec(dataDir=path, **fields), options=SITE)
    assert (problem.path, problem.code) == ("dataDir", code)
    with pytest.raises(RenderError):
        resolve(path, **fields)


def test_every_path_of_the_job_file_is_checked() -> None:
    uri = "s4://bucket/x"
    spec = make_spec(
        **dict.fromkeys(("authFile", "dataDir", "outputDir", "codeDir", "modelDir"), uri),
        mounts=[{"source": "$PAI_TASK_INDEX", "target": "/x"}],
    )
    problems = find_path_problems(spec, options=SITE)
    assert [problem.path for problem in problems] == [
        "authFile",
        "dataDir",
        "outputDir",
        "codeDir",
        "modelDir",
        "mounts[0].source",
    ]
    assert "s4://bucket" in str(problems[0].suggestion)


def test_code_and_credentials_may_have_colons() -> None:
    """They are not mounted."""
    assert not find_path_problems(make_spec(codeDir="/c/a:b", authFile="/c/a:b"), options=SITE)


def directories(**fields: Any) -> Any:
    paths = AttemptPaths("/scratch", "0a1b", 2)
    spec = resolve_paths(make_spec(**fields), ALICE, options=SITE)
    return resolve_directories(spec, paths, options=SITE)


def test_every_job_has_directories_for_results_and_models() -> None:
    dirs = directories()
    assert dirs.variables["PAI_OUTPUT_DIR"] == dirs.variables["RESULT_DIR"] == f"{JOB}/output"
    assert dirs.variables["MODEL_DIR"] == f"{JOB}/model"
    assert {f"{JOB}/output", f"{JOB}/model"} <= set(dirs.created)
    assert Bind(f"{JOB}/output", f"{JOB}/output") in dirs.binds
    assert "/model" not in {bind.target for bind in dirs.binds}  # an image may have a /model
    assert dirs.required == ()


@pytest.mark.parametrize(
    ("fields", "source", "variable"),
    [
        ({"importedFrom": "octopus"}, f"{JOB}/model", f"{JOB}/model"),
        ({"modelDir": "~/models"}, "~/models", "~/models"),
        ({"modelDir": "~/models", "importedFrom": "ffdl"}, "~/models", f"{JOB}/2/work"),
    ],
)
def test_model_directory(fields: dict[str, str], source: str, variable: str) -> None:
    dirs = directories(**fields)
    assert Bind(source, "/model") in dirs.binds
    assert source in dirs.created
    assert source not in dirs.required
    assert dirs.variables["MODEL_DIR"] == variable


def test_ffdl_jobs_have_no_model_directory_of_their_own() -> None:
    dirs = directories(importedFrom="ffdl", codeDir="~/code")
    assert dirs.model == ""
    assert f"{JOB}/model" not in dirs.created
    assert dirs.variables["MODEL_DIR"] == f"{JOB}/2/code"


def test_code_directory_is_copied_and_not_mounted() -> None:
    dirs = directories(codeDir="~/code")
    assert (dirs.code_source, dirs.work) == ("~/code", f"{JOB}/2/code")
    assert dirs.variables["PAI_CODE_DIR"] == f"{JOB}/2/code"
    assert Bind(f"{JOB}/2/code", "/code") in dirs.binds
    assert "~/code" not in {bind.source for bind in dirs.binds}
    assert dirs.required == ("~/code",)


def test_uploaded_code_is_not_copied() -> None:
    dirs = directories(code={"selector": "codeFile"}, codeDir="/ignored")
    assert (dirs.code_source, dirs.work) == ("", f"{JOB}/2/code")
    assert dirs.required == (f"{JOB}/2/code",)


def test_directories_that_the_job_file_names_are_used() -> None:
    dirs = directories(outputDir="/results/$PAI_JOB_NAME", dataDir="/data/x")
    assert dirs.variables["PAI_OUTPUT_DIR"] == "/results/mnist"
    assert "/results/mnist" in dirs.created
    assert dirs.required == ("/data/x",)
    assert Bind("/data/x", "/dataset", read_only=True) in dirs.binds


def test_mount_without_source_uses_the_storage_of_its_name() -> None:
    def resolve_storage(name: str) -> tuple[str, list[str]]:
        spec = make_spec(mounts=[{"name": name, "target": "/t"}])
        options = RenderOptions(storages={"team": "~/team"})
        problems = find_path_problems(spec, options=options)
        if problems:
            return "", [f"{p.path} {p.code} {p.suggestion}" for p in problems]
        return resolve_paths(spec, JobIdentity(), options=options).mounts[0].source, []

    assert resolve_storage("team") == ("~/team", [])
    assert resolve_storage("tean") == ("", ["mounts[0].name storage_unknown team"])
