"""Command lines of container runtimes that cannot be installed in the test environment: enroot 4.1, pyxis 0.24.

Fake programs record their arguments and execute the command given to them, so the complete batch script runs
without Slurm. The asserted syntax is that of the real programs: `enroot create --name NAME IMAGE`,
`enroot start --rw --mount FSTAB… NAME COMMAND…` (an fstab entry with colons instead of spaces),
`enroot import --output FILE URI`, and the srun options --container-* of pyxis.

The fake enroot refuses what the real one refuses: an output file that exists, a container that exists (create) or does
not exist (start). It prints what unsquashfs prints, and a failed create leaves a part of the directory. Its import reads
the login from $ENROOT_CONFIG_PATH/.credentials, in netrc format: the user name is that of the URI, or of the entry for
the registry without its port (4.1: the grep and awk expressions in docker.sh).
"""

from __future__ import annotations

import fcntl
import os
import stat
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
  import)
    [[ ! -e $3 ]] || { echo "[ERROR] File already exists: $3" >&2; exit 1; }
    if [[ -n ${ENROOT_CONFIG_PATH-} ]]; then
      stat -c '%a' "$ENROOT_CONFIG_PATH" >"$RECORD.mode"
      cp "$ENROOT_CONFIG_PATH/.credentials" "$RECORD.credentials"
    fi
    [[ -z ${IMPORT_ERROR-} ]] || { printf '[INFO] Querying registry for permission grant\n%s\n' "$IMPORT_ERROR" >&2; exit 1; }
    : >"$3" ;;
  create)
    root=$ENROOT_DATA_PATH/$3
    [[ ! -e $root ]] || { echo "[ERROR] File already exists: $root" >&2; exit 1; }
    mkdir -p "$root/etc"
    printf '[INFO] Extracting squashfs filesystem...\nParallel unsquashfs: Using 2 processors\n' >&2
    if [[ -n ${CREATE_ERROR-} ]]; then
      chmod 500 "$root/etc"
      printf '%s\ncreated 1 directory\n' "$CREATE_ERROR" >&2
      exit 1
    fi
    printf '%s' "${IMAGE_ENVIRONMENT-}" >"$root/etc/environment" ;;
  start)
    while [[ $1 != /bin/sh ]]; do name=$1; shift; done
    [[ -d $ENROOT_DATA_PATH/$name && -d $ENROOT_RUNTIME_PATH ]] || { echo "[ERROR] No such file or directory: $name" >&2; exit 1; }
    printf '%s\n' "${NVIDIA_VISIBLE_DEVICES-unset} ${NVIDIA_DRIVER_CAPABILITIES-unset}" >>"$RECORD.gpus"
    exec "$@" ;;
esac
""",
    "srun": """if [[ -n ${SRUN_FAILED_ONCE-} && ! -e $SRUN_FAILED_ONCE ]]; then
  : >"$SRUN_FAILED_ONCE"
  printf '%s\n' "$SRUN_ERROR" >&2
  exit 1
fi
printf '%s\n' "${NVIDIA_VISIBLE_DEVICES-unset} ${NVIDIA_DRIVER_CAPABILITIES-unset}" >>"$RECORD.srun_gpus"
[[ -z ${ENROOT_CONFIG_PATH-} ]] || cp -rL "$ENROOT_CONFIG_PATH" "$RECORD.config"
while [[ $1 != /bin/bash ]]; do
  [[ $1 != --ntasks=* ]] || tasks=${1#*=}
  [[ $1 != --input=* ]] || exec <"${1#--input=}"
  shift
done
export SLURM_PROCID=0 SLURM_STEP_ID=0 SLURMD_NODENAME=n1
if ((tasks > 1)); then # all tasks on this node, each with the standard input of srun (--input=all)
  for ((SLURM_PROCID = 0; SLURM_PROCID < tasks; SLURM_PROCID++)); do
    mkfifo "$RECORD.input.$SLURM_PROCID"
    "$@" <"$RECORD.input.$SLURM_PROCID" &
  done
  exec {input}<&0
  tee "$RECORD".input.* <&"$input" >/dev/null 2>&1 & # bash gives other background commands /dev/null
  feeder=$!
  code=0
  for job in $(jobs -p); do [[ $job == "$feeder" ]] || wait "$job" || code=$?; done
  kill "$feeder" 2>/dev/null # it ends by itself if all tasks have ended
  exit "$code"
fi
[[ -n ${SPLIT_LINES-} ]] || exec "$@"
"$@" | while IFS= read -r line; do
  printf '%s' "${line:0:3}"
  sleep 1.2
  printf '%s\n' "${line:3}"
done
exit "${PIPESTATUS[0]}"
""",
    "scancel": "",
    "apptainer": """[[ $1 != pull ]] || { : >"$2"; exit; }
while [[ $1 != /bin/sh ]]; do shift; done
exec "$@"
""",
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
        self,
        job: dict[str, Any],
        runtime: str,
        expected_stderr: str | None = "",  # None: not compared
        image_logins: dict[str, dict[str, str]] | None = None,
    ) -> tuple[int, list[list[str]]]:
        rendered = render_job(
            job, self.paths, runtime=runtime, grace_s=1, image_logins=image_logins
        )
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
        assert expected_stderr in (None, done.stderr)
        self.batch_log = done.stdout
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return done.returncode, [line.split("\x1f")[:-1] for line in lines]

    def recorded(self, suffix: str) -> str:
        return Path(f"{self.record}.{suffix}").read_text()

    def files_left(self) -> list[str]:
        """Files in the node's temporary directory that belong to no fixture of this test."""
        data = self.record.parent / f"sluice-enroot-{os.getuid()}"
        return sorted(path.name for path in data.iterdir())


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


UNPACK_OUTPUT = (
    "[INFO] Extracting squashfs filesystem...\nParallel unsquashfs: Using 2 processors\n"
)


def test_enroot_unpacks_starts_and_removes_the_container(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    code, calls = node.run(job_document(tmp_path / "data"), "enroot", UNPACK_OUTPUT)
    check_outcome(node, code)  # the task's log has only the task's output
    image = f"{node.home}/.cache/sluice/images/nvcr.io_nv_torch_1.sqsh"
    fetch, create, start = (call for call in calls if call[0] == "enroot")
    assert fetch[1:] == ["import", "--output", f"{image}.77", "docker://nvcr.io#nv/torch:1"]
    assert create[1:3] == ["create", "--name"]
    name = create[3]
    assert name.startswith("sluice-77-0-")
    assert create[4:] == [image]
    assert start[1:3] == ["start", "--rw"]
    mounts = option_values(start, "--mount")
    data = tmp_path / "data"
    assert f"{node.paths.dir}:{node.paths.dir}:none:x-create=auto,rbind,rw" in mounts
    assert f"{data}:/dataset:none:x-create=auto,rbind,ro" in mounts
    shm = "tmpfs:/dev/shm:tmpfs:x-create=dir,rw,nosuid,nodev,mode=1777,size=64m"
    assert shm in mounts
    assert start[start.index("/bin/sh") - 1] == name
    assert node.files_left() == []


def test_enroot_tasks_on_one_node_share_one_unpacked_image(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    # Each task waits for the others, so that all use the directory at the same time.
    command = "touch up-$PAI_TASK_INDEX; until [ $(ls up-* | wc -l) = 3 ]; do sleep 0.1; done"
    document = job_document(tmp_path / "data", taskNumber=3, command=command)
    code, calls = node.run(document, "enroot", UNPACK_OUTPUT)
    assert code == 0
    names = [call[1] for call in calls if call[0] == "enroot"]
    assert sorted(names) == ["create", "import", "start", "start", "start"]
    assert node.files_left() == []


def test_failed_enroot_create_leaves_nothing_and_names_its_error(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    node.env["CREATE_ERROR"] = "FATAL ERROR: write_file: failed to create file: No space left"
    stderr = f"{UNPACK_OUTPUT}{node.env['CREATE_ERROR']}\ncreated 1 directory\n"
    code, _ = node.run(job_document(tmp_path / "data"), "enroot", stderr)
    assert code == 202
    result = parse_script_result(Path(node.paths.path_to("result")).read_text())
    assert (result.reason, result.image) == ("image_failed", "nvcr.io/nv/torch:1")
    assert result.error == node.env["CREATE_ERROR"]
    assert "could not be unpacked on n1: FATAL" in Path(node.paths.task_log("w", 0)).read_text()
    assert node.files_left() == []


def test_enroot_container_is_removed_after_the_task_was_killed(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    """task.sh gets SIGTERM, the task ignores it and is killed after the grace period of one second."""
    wrapper = "$(awk '{ print $4 }' /proc/$PPID/stat)"  # the parent of enter.sh
    command = f"trap '' TERM; echo up; kill -TERM {wrapper}; sleep 60"
    code, _ = node.run(job_document(tmp_path / "data", command=command), "enroot", None)
    assert code == 143  # bash also reports the killed process
    state = parse_task_state(Path(node.paths.path_to("tasks", "w-0.state")).read_text())
    assert (state.state, state.reason, state.signal) == ("ended", "stopped", 9)
    assert node.files_left() == []


def test_enroot_removes_what_a_killed_job_left_behind(node: FakeSlurmNode, tmp_path: Path) -> None:
    data = tmp_path / f"sluice-enroot-{os.getuid()}"
    (data / "sluice-5-0-1" / "etc").mkdir(parents=True)
    (data / "sluice-5-0-1" / "etc").chmod(0o500)
    (data / "sluice-5-0-1.lock").touch()
    used = data / "sluice-6-0-1"
    used.mkdir()
    with (data / "sluice-6-0-1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        code, _ = node.run(job_document(tmp_path / "data"), "enroot", UNPACK_OUTPUT)
    assert code == 3
    assert node.files_left() == ["sluice-6-0-1", "sluice-6-0-1.lock"]


@pytest.mark.parametrize(
    ("gpus", "environment", "expected"),
    [
        (0, "", "void unset"),
        (2, "", "2,3 compute,utility"),
        (2, "NVIDIA_DRIVER_CAPABILITIES=all\n", "2,3 unset"),
    ],
)
def test_enroot_gets_the_devices_of_the_task(
    node: FakeSlurmNode, tmp_path: Path, gpus: int, environment: str, expected: str
) -> None:
    """The hook 98-nvidia mounts no driver while NVIDIA_VISIBLE_DEVICES is unset or "void"."""
    node.env |= {"CUDA_VISIBLE_DEVICES": "2,3", "IMAGE_ENVIRONMENT": environment}
    command = 'echo "it\'s \\`me\\` $PAI_TASK_INDEX"; exit 3'
    document = job_document(tmp_path / "data", gpuNumber=gpus, command=command)
    code, _ = node.run(document, "enroot", UNPACK_OUTPUT)
    assert code == 3
    assert node.recorded("gpus") == f"{expected}\n"


AUTH_FILES = {
    "registry": ("nvcr.io", "docker://nvcr.io#nv/torch:1", "nvcr.io", "nvcr.io/nv/torch:1"),
    "port": ("r.org:5000", "docker://r.org:5000#a/b:1", "r.org", "r.org:5000/a/b:1"),
    "hub": ("", "docker://bob@a/b:1", "registry-1.docker.io", "a/b:1"),
    "hub-url": ("https://index.docker.io/v1/", "docker://bob@b:1", "registry-1.docker.io", "b:1"),
}


@pytest.mark.parametrize("runtime", ["enroot", "pyxis"])
@pytest.mark.parametrize("case", AUTH_FILES)
@pytest.mark.proves("authFile")
def test_auth_file_becomes_enroot_credentials(
    node: FakeSlurmNode, tmp_path: Path, case: str, runtime: str
) -> None:
    registry, uri, machine, image = AUTH_FILES[case]
    auth_file = tmp_path / "auth"
    auth_file.write_text(f"{registry}\nbob\np'a$s")
    document = {**job_document(tmp_path / "data"), "image": image, "authFile": str(auth_file)}
    code, calls = node.run(document, runtime, UNPACK_OUTPUT if runtime == "enroot" else "")
    assert code == 3
    assert next(call for call in calls if call[:2] == ["enroot", "import"])[4] == uri
    credentials = node.recorded("credentials").splitlines()
    assert credentials[0] == f"machine {machine} login bob password p'a$s"
    assert credentials[-1] == "default login bob password p'a$s"
    assert int(node.recorded("mode"), 8) == stat.S_IRWXU
    assert not list(tmp_path.glob("sluice.*"))  # the directory of the batch script is removed


def test_login_of_the_job_file_is_passed_to_enroot(node: FakeSlurmNode, tmp_path: Path) -> None:
    logins = {"nvcr.io/nv/torch:1": {"username": "$oauthtoken", "password": "key"}}
    code, _ = node.run(
        job_document(tmp_path / "data"), "enroot", UNPACK_OUTPUT, image_logins=logins
    )
    assert code == 3
    expected = "machine nvcr.io login $oauthtoken password key"
    assert node.recorded("credentials").splitlines()[0] == expected


@pytest.mark.parametrize("registry", ["r.org", "nvcr.io:443", "evilnvcr.io"])
def test_login_for_another_registry_is_not_sent(
    node: FakeSlurmNode, tmp_path: Path, registry: str
) -> None:
    auth_file = tmp_path / "auth"
    auth_file.write_text(f"{registry}\nbob\nsecret\n")
    document = {**job_document(tmp_path / "data"), "authFile": str(auth_file)}
    code, _ = node.run(document, "enroot", UNPACK_OUTPUT)
    assert code == 3
    assert not Path(f"{node.record}.credentials").exists()
    assert f"the login in {auth_file} is for {registry} and not used for nvcr.io" in node.batch_log


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("[ERROR] URL https://nvcr.io/v2/nv/torch/manifests/1 returned error code: 404 Not Found", "image_missing"),
        ("[ERROR] URL https://nvcr.io/v2/ returned error code: 401 Unauthorized", "image_missing"),
        ("curl: (6) Could not resolve host: nvcr.io", "image_failed"),
        ("curl: (7) Failed to connect to nvcr.io port 443: \x1b[31mrefused\x07", "image_failed"),
        ("enroot: line 3: curl: command not found", "image_failed"),
        ("[ERROR] mkdir: cannot create directory: permission denied", "image_failed"),
        ("[ERROR] requested access to the resource is denied", "image_missing"),
        ("x" * 5000, "image_failed"),
    ],
)  # fmt: skip
def test_import_error_reaches_the_result(
    node: FakeSlurmNode, tmp_path: Path, error: str, reason: str
) -> None:
    node.env["IMPORT_ERROR"] = error
    code, _ = node.run(job_document(tmp_path / "data"), "enroot")
    result = parse_script_result(Path(node.paths.path_to("result")).read_text())
    assert (result.reason, code) == (reason, {"image_missing": 201, "image_failed": 202}[reason])
    assert result.image == "nvcr.io/nv/torch:1"
    shown = error.removeprefix("[ERROR] ").replace("\x1b[31m", "").replace("\x07", "")
    assert result.error == shown[:300]
    assert not list((node.home / ".cache/sluice/images").glob("*.77"))


def test_password_that_enroot_would_evaluate_is_refused(
    node: FakeSlurmNode, tmp_path: Path
) -> None:
    auth_file = tmp_path / "auth"
    auth_file.write_text("nvcr.io\nbob\n$(touch pwned)\n")
    document = {**job_document(tmp_path / "data"), "authFile": str(auth_file)}
    code, calls = node.run(document, "enroot")
    assert (code, [call for call in calls if call[0] == "enroot"]) == (202, [])
    result = parse_script_result(Path(node.paths.path_to("result")).read_text())
    assert result.error.startswith("enroot cannot use the login for nvcr.io")


@pytest.mark.parametrize("allowed", [True, False])
def test_apptainer_task_runs_where_user_namespaces_are_not_allowed(
    node: FakeSlurmNode, tmp_path: Path, allowed: bool
) -> None:
    """Then /dev/shm is the one of the node, and the task's log says so."""
    if not allowed:
        unshare = tmp_path / "bin" / "unshare"
        unshare.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
        unshare.chmod(0o755)
    command = "stat -c %d /dev/shm; exit 3"
    code, _ = node.run(job_document(tmp_path / "data", command=command), "apptainer")
    assert code == 3
    *notes, device = Path(node.paths.task_log("w", 0)).read_text().splitlines()
    assert (int(device) == os.stat("/dev/shm").st_dev) is not allowed
    assert ["shmMB has no effect on n1" in note for note in notes] == ([] if allowed else [True])


@pytest.mark.parametrize(
    ("gpus", "expected"), [(0, "void unset"), (1, "all compute,utility,video")]
)
@pytest.mark.proves("taskRoles[].shmMB")
def test_pyxis_gets_shared_memory_and_gpus_by_the_environment(
    node: FakeSlurmNode, tmp_path: Path, gpus: int, expected: str
) -> None:
    """Pyxis passes these variables to enroot (enroot_want_env in pyxis_slurmstepd.c)."""
    own = node.home / ".config" / "enroot"
    (own / "mounts.d").mkdir(parents=True)
    (own / "mounts.d" / "10-own.fstab").write_text("/opt /opt none bind\n")
    (own / ".credentials").write_text("machine r.org login a password b\n")
    code, _ = node.run(job_document(tmp_path / "data", gpuNumber=gpus), "pyxis")
    check_outcome(node, code)
    assert node.recorded("srun_gpus") == f"{expected}\n"
    config = Path(f"{node.record}.config")
    shm = "tmpfs /dev/shm tmpfs x-create=dir,rw,nosuid,nodev,mode=1777,size=64m\n"
    assert (config / "mounts.d" / "90-sluice-shm.fstab").read_text() == shm
    assert (config / "mounts.d" / "10-own.fstab").read_text() == "/opt /opt none bind\n"
    assert (config / ".credentials").exists()


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
