"""Host names of tasks and SSH between tasks (jobssh), on the embedded cluster."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jobs.jobfile.importers import load_text
from jobs.script.task_state import STOP_SIGNAL
from tests.frameworks.images import ensure_framework_image
from tests.slurm.batch_harness import BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster

WAIT = "echo up; sleep infinity"
OTHER_USER = "sluice-bob"


@pytest.fixture(scope="session")
def ssh_image() -> str:
    """An image with Debian's openssh-client, OpenMPI and Python."""
    return str(ensure_framework_image("openmpi"))


def role(name: str, command: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": command, "memoryMB": 200, **more}


def submit_pair(
    batch_harness: BatchHarness, image: str, command: str, **more: Any
) -> SubmittedAttempt:
    """Submit a job whose role main runs the command and decides the result, while two workers wait."""
    options = {key: more.pop(key) for key in ("files", "own_addresses") if key in more}
    roles = [
        role("main", command, minSucceededTaskCount=1),
        role("worker", WAIT, taskNumber=2, placement="separate"),
    ]
    return batch_harness.submit(
        {"image": image, "jobssh": True, "placement": "separate", "taskRoles": roles, **more},
        **options,
    )


RESOLVE = textwrap.dedent(
    """
    import os, socket
    for name in ("a.b-0", "a-b-1", "task0-1", "ps_x-0", "ps-x-0", "task1-0", "localhost", os.uname().nodename):
        print(name, socket.gethostbyname(name))
    """
)


def test_task_names_resolve_in_the_container(batch_harness: BatchHarness) -> None:
    roles = [role("a.b", "python3 resolve.py", taskNumber=2), role("ps_x", "python3 resolve.py")]
    job = batch_harness.submit(
        {"image": "python", "taskRoles": roles}, files={"resolve.py": RESOLVE}
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    states = [job.state(*task) for task in (("a.b", 0), ("a.b", 1), ("ps_x", 0))]
    first, second, third = (state.ip for state in states if state)
    lines = dict(line.split() for line in job.log_text("ps_x").splitlines())
    assert list(lines.values())[:6] == [first, second, second, third, third, third]
    assert lines["localhost"] == "127.0.0.1"


def test_own_etc_hosts_of_the_job_is_kept(batch_harness: BatchHarness) -> None:
    own = Path(batch_harness.root) / "own-hosts"
    own.write_text("10.9.8.7 elsewhere\n")
    own.chmod(0o644)
    mounts = [{"source": str(own), "target": "/etc/hosts"}]
    job = batch_harness.submit({"mounts": mounts, "taskRoles": [role("w", "cat /etc/hosts")]})
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("w") == "10.9.8.7 elsewhere\n"


DESCRIBE = textwrap.dedent(
    """
    import json, os, sys
    names = ("PAI_CONTAINER_ID", "TOKEN", "CUDA_VISIBLE_DEVICES", "PAI_HOST_IP_main_0")
    values = {name: os.environ.get(name) for name in names}
    mounts = sorted(line.split()[4] for line in open("/proc/self/mountinfo"))
    arguments = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments.append(open(f"/proc/{pid}/cmdline").read())
        except OSError:
            pass
    print(json.dumps({**values, "cwd": os.getcwd(), "stdin": sys.stdin.read(), "image": os.path.exists("/usr/bin/mpirun"),
                      "mounts": mounts, "secret_in_arguments": any("s3cr3t-" in text for text in arguments)}))
    """
)


@pytest.mark.proves("jobssh")
def test_session_lands_in_a_container_like_the_tasks(
    batch_harness: BatchHarness, ssh_image: str
) -> None:
    command = textwrap.dedent(
        """
        set -e
        for i in 0 1; do printf 'in %s' $i | ssh worker-$i python3 describe.py; done
        python3 describe.py </dev/null
        ssh worker-1 'exit 7' || echo "exit code $?"
        ssh task1-0 "printf '%s|' \\"it's\\" '\\$HOME' a  b"; echo
        cat describe.py | ssh main-0 'cat > copy.py'; scp -q copy.py worker-1:copied.py; cmp describe.py copied.py
        """
    )
    gpus = {"gpuNumber": 1, "gpuType": "a100"}
    job = batch_harness.submit(
        {
            "image": ssh_image,
            "jobssh": True,
            "jobEnvs": {"TOKEN": "s3cr3t-`id`'\n$(id)"},
            "taskRoles": [
                role("main", command, minSucceededTaskCount=1),
                role("worker", WAIT, taskNumber=2, **gpus),
            ],
        },
        files={"describe.py": DESCRIBE},
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0"), job.log_text("main")
    lines = job.log_text("main").splitlines()
    sessions, task = [json.loads(line) for line in lines[:2]], json.loads(lines[2])
    assert lines[3:] == ["exit code 7", "it's|$HOME|a|b|"]
    for index, session in enumerate(sessions):
        state = job.state("worker", index)
        assert state is not None
        assert session["PAI_CONTAINER_ID"] == f"worker-{index}"
        assert session["stdin"] == f"in {index}"
        assert session["CUDA_VISIBLE_DEVICES"] == ",".join(state.gpus) != ""
        assert session["cwd"] == task["cwd"]
        assert session["image"]
        assert session["TOKEN"] == task["TOKEN"] == "s3cr3t-`id`'\n$(id)"
        assert session["PAI_HOST_IP_main_0"] == task["PAI_HOST_IP_main_0"]
        assert not session["secret_in_arguments"]
        assert set(session["mounts"]) >= {
            mount
            for mount in task["mounts"]
            if mount in ("/code", "/userhome", "/etc/hosts") or mount.startswith(job.paths.job_dir)
        }


def test_mpirun_starts_ranks_in_other_tasks(batch_harness: BatchHarness, ssh_image: str) -> None:
    command = "mpirun -np 3 -H main-0,worker-0,worker-1 sh -c 'echo rank $OMPI_COMM_WORLD_RANK in $PAI_CONTAINER_ID'"
    job = submit_pair(batch_harness, ssh_image, command, own_addresses=True)
    assert job.wait_for_end() == ("COMPLETED", "0:0"), job.log_text("main")
    ranks = ["rank 0 in main-0", "rank 1 in worker-0", "rank 2 in worker-1"]
    assert sorted(job.log_text("main").splitlines()) == ranks


def test_openpai_job_file_with_the_ssh_plugin_runs_unchanged(
    batch_harness: BatchHarness, ssh_image: str
) -> None:
    text = textwrap.dedent(
        f"""
        protocolVersion: 2
        name: gang_ssh
        type: job
        prerequisites:
          - {{protocolVersion: 2, name: mpi, type: dockerimage, uri: {ssh_image}}}
        taskRoles:
          master:
            instances: 1
            completion: {{minSucceededInstances: 1}}
            dockerImage: mpi
            resourcePerInstance: {{cpu: 1, memoryMB: 400, gpu: 0}}
            commands:
              - mpirun --allow-run-as-root -np 2 -H master-0:1,worker-0:1 hostname | wc -l
              - ssh worker-0 env | grep ^PAI_TASK_ROLE_NAME
          worker:
            instances: 1
            dockerImage: mpi
            resourcePerInstance: {{cpu: 1, memoryMB: 400, gpu: 0}}
            commands: [sleep infinity]
        extras:
          com.microsoft.pai.runtimeplugin:
            - plugin: ssh
              parameters: {{jobssh: true, sshbarrier: true, userssh: {{}}}}
        """
    )
    loaded = load_text(text)
    assert loaded.warnings == ()
    document = loaded.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["namespace"] = "default"
    job = batch_harness.submit(document)
    assert job.wait_for_end() == ("COMPLETED", "0:0"), job.log_text("master")
    assert job.log_text("master") == "2\nPAI_TASK_ROLE_NAME=worker\n"


def run_as(user: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["runuser", "-u", user, "--", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_nobody_else_can_log_in(batch_harness: BatchHarness, ssh_image: str) -> None:
    job = submit_pair(batch_harness, ssh_image, WAIT)
    job.wait_for_output("worker", 1)
    state = job.state("worker", 1)
    assert state is not None
    port = str(state.ports["ssh"][0])
    user = pwd.getpwuid(Path(job.paths.dir).stat().st_uid).pw_name
    key, own_key = job.paths.path_to("ssh", "user_key"), f"/tmp/sluice-test-{os.getpid()}-key"
    options = ["-p", port, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    options += ["-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-F", "none"]
    try:
        for person in (OTHER_USER, user):
            # A key of the person's own does not open the server, for no user name: also not the owner's.
            run_as(person, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", own_key)
            for login in (user, person):
                refused = run_as(
                    person, "ssh", *options, "-i", own_key, f"{login}@{state.ip}", "echo inside"
                )
                assert (refused.returncode, refused.stdout) == (255, "")
                assert "Permission denied (publickey)" in refused.stderr
            for file in (own_key, f"{own_key}.pub"):
                Path(file).unlink()
    finally:
        for file in (own_key, f"{own_key}.pub"):
            Path(file).unlink(missing_ok=True)
    assert run_as(OTHER_USER, "cat", key).returncode != 0
    private = [str(path) for path in Path("/tmp").glob("sluice-task.*") if path.owner() == user]
    assert private
    assert all(run_as(OTHER_USER, "ls", path).returncode != 0 for path in private)
    # The job's own key does.
    entered = run_as(
        user, "ssh", *options, "-i", key, f"{user}@{state.ip}", "echo $PAI_CONTAINER_ID"
    )
    assert entered.stdout == "worker-1\n"


def find_processes(marker: str) -> list[str]:
    """Find processes with the marker in their arguments or environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in text:
            found.append(path.name)
    return found


@pytest.mark.parametrize("how", ["stopped", "completed"])
def test_server_and_sessions_end_with_the_task(
    batch_harness: BatchHarness, ssh_image: str, how: str
) -> None:
    """Also processes that a session left in the background, as OpenMPI's daemon does."""
    end = "sleep infinity" if how == "stopped" else "sleep 1"
    command = textwrap.dedent(
        f"""
        ssh worker-0 'echo $SLUICE_SSH_SESSION; trap "" HUP; setsid sleep 7777 >/dev/null 2>&1 </dev/null & echo $!'
        ssh worker-0 'sleep 8888' &
        until ssh worker-0 'grep -lz 8888 /proc/[0-9]*/cmdline' 2>/dev/null; do sleep 0.1; done >/dev/null
        echo up
        {end}
        """
    )
    job = submit_pair(batch_harness, ssh_image, command)
    job.wait_for_output("main")
    directory, background = job.log_text("main").split()[:2]
    assert background in find_processes(directory)
    assert len(find_processes(f"{directory}/sshd_config")) == 1
    assert len(find_processes(directory)) >= 3  # the server, and the processes of two sessions
    if how == "stopped":
        job.command("scancel", "--batch", f"--signal={STOP_SIGNAL}", job.slurm_job_id)
    assert job.wait_for_end()[0] == ("CANCELLED" if how == "stopped" else "COMPLETED")
    job.wait_until("the end of the processes", lambda: not find_processes(directory), 5)
    assert not Path(directory).exists()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"jobssh": True}, ("FAILED", "208:0")),
        ({"framework": {"name": "mpi", "strategy": "hostfile"}}, ("COMPLETED", "0:0")),
    ],
    ids=["required", "optional"],
)
def test_node_without_sshd_is_reported(
    batch_harness: BatchHarness, more: dict[str, Any], expected: tuple[str, str]
) -> None:
    job = batch_harness.submit(
        {"image": "busybox", "taskRoles": [role("worker", "echo ran", taskNumber=2)], **more},
        edit={
            "sshd.sh": (":/usr/sbin:/usr/local/sbin:/sbin type -P sshd", " type -P no-such-sshd")
        },
    )
    assert job.wait_for_end() == expected
    log = job.log_text("worker")
    assert "sluice: jobssh: there is no sshd on n" in log
    assert ("ran" in log) == (expected[0] == "COMPLETED")
    if expected[0] == "FAILED":
        assert job.script_result().reason == "ssh_failed"
        assert job.script_result().is_permanent


def test_image_without_ssh_client_says_so(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit(
        {"image": "busybox", "jobssh": True, "taskRoles": [role("w", "echo ran; ssh w-0 true")]}
    )
    assert job.wait_for_end() == ("FAILED", "127:0")
    lines = job.log_text("w").splitlines()
    assert lines[0].startswith("sluice: this image has no ssh client")
    assert lines[1:] == ["ran", "sluice: this image has no ssh"]


SCHEDULER = textwrap.dedent(
    """
    import os, socket, time
    env = os.environ
    address = env["MS_SCHED_HOST"], int(env["MS_SCHED_PORT"])
    if env["MS_ROLE"] == "MS_SCHED":
        server = socket.create_server(("", address[1]))
        peers = [server.accept()[0] for _ in range(int(env["MS_WORKER_NUM"]))]
        ranks = sorted(peer.recv(10).decode() for peer in peers)
        for peer in peers:
            peer.sendall(",".join(ranks).encode())
        time.sleep(600)
    for _ in range(200):
        try:
            peer = socket.create_connection(address, timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    peer.sendall(env["MS_NODE_ID"].encode())
    print(env["RANK_ID"], "of", env["RANK_SIZE"], "ranks", peer.recv(100).decode())
    """
)


@pytest.mark.parametrize("own_scheduler", [False, True])
def test_mindspore_workers_meet_at_the_scheduler(
    batch_harness: BatchHarness, own_scheduler: bool
) -> None:
    """The program does what MindSpore does with these variables. The scheduler starts after preCommands."""
    prepare = {"preCommands": ["sleep 1; cp train.py prepared-$MS_ROLE-$VC_TASK_INDEX.py"]}
    command = "python3 prepared-MS_WORKER-$VC_TASK_INDEX.py"
    roles = [role("worker", command, taskNumber=2, minSucceededTaskCount=2, **prepare)]
    if own_scheduler:
        roles.append(role("scheduler", "python3 train.py"))
    job = batch_harness.submit(
        {"image": "python", "framework": "mindspore", "taskRoles": roles},
        files={"train.py": SCHEDULER},
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    logs = [job.log_text("worker", i) for i in (0, 1)]
    assert logs == [f"{i} of 2 ranks 0,1\n" for i in (0, 1)]
    job.wait_until("the end of the processes", lambda: not find_processes(job.paths.dir), 10)


def test_missing_framework_server_fails_the_task(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit(
        {
            "image": "python",
            "framework": "horovod",
            "taskRoles": [role("worker", "echo ran", taskNumber=2)],
        }
    )
    assert job.wait_for_end() == ("FAILED", "209:0")
    log = job.log_text("worker")
    assert "No module named 'horovod'" in log
    assert "sluice: the server of horovod is not available" in log
    assert "ran" not in log
