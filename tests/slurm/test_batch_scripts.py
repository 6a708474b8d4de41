"""Rendered batch scripts on the embedded cluster, with sbatch and containers."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import textwrap
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from jobs.script.task_state import STOP_SIGNAL
from tests.slurm.batch_harness import USER, BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster

# Every task listens on its port, connects to all tasks of TF_CONFIG, and prints its environment.
CONNECT_ALL = textwrap.dedent(
    """
    import json, os, socket, threading, time
    config = json.loads(os.environ["TF_CONFIG"])
    me = config["task"]
    own = config["cluster"][me["type"]][me["index"]]
    server = socket.create_server(("0.0.0.0", int(own.split(":")[1])))
    all_addresses = [entry for entries in config["cluster"].values() for entry in entries]
    received = []
    def serve():
        while len(received) < len(all_addresses):
            with server.accept()[0] as peer:
                received.append(peer.makefile().readline().strip())
    thread = threading.Thread(target=serve)
    thread.start()
    for entry in all_addresses:
        host, port = entry.split(":")
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), timeout=5) as peer:
                    peer.sendall(f"{me['type']}-{me['index']}\\n".encode())
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
    thread.join(30)
    print(json.dumps({"env": dict(os.environ), "received": sorted(received), "address": socket.gethostbyname(own.split(":")[0])}))
    """
)


def connecting_roles() -> list[dict[str, Any]]:
    common = {"command": "python3 connect_all.py", "memoryMB": 200}
    worker = {"taskNumber": 2, "cpuNumber": 2, "gpuNumber": 1, "gpuType": "a100"}
    grpc = {"portList": [{"label": "grpc", "portNumber": 2}]}
    return [{"name": "ps", **common}, {"name": "worker", **common, **worker, **grpc}]


@pytest.mark.parametrize(("placement", "layout"), [("auto", "packed"), ("separate", "het")])
@pytest.mark.proves("framework", "framework.name", "image")
def test_all_tasks_connect_and_get_their_variables(
    batch_harness: BatchHarness, placement: str, layout: str
) -> None:
    job = batch_harness.submit(
        {
            "image": "python",
            "framework": "tensorflow",
            "placement": placement,
            "taskRoles": connecting_roles(),
            "jobEnvs": {"HOSTILE": "it's `id` $(id) \"\\ \n#SBATCH é中"},
        },
        files={"connect_all.py": CONNECT_ALL},
    )
    assert job.plan.layout == layout
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
    outputs = {task: json.loads(job.log_text(*task)) for task in tasks}
    states = {task: job.state(*task) for task in tasks}
    all_tasks = sorted(f"{role}-{index}" for role, index in tasks)
    for (role, index), output in outputs.items():
        env, state = output["env"], states[role, index]
        assert state is not None
        assert output["received"] == all_tasks
        assert env["PAI_CURRENT_TASK_ROLE_NAME"] == role
        assert (
            env["PAI_TASK_INDEX"] == env["PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX"] == str(index)
        )
        assert env["PAI_TASK_ROLE_LIST"] == "ps,worker"
        assert env["PAI_CONTAINER_HOST_PORT"] == str(state.ports["http"][0])
        assert env["PAI_WORK_DIR"] == env["PWD"] == str(Path(job.paths.dir) / "code")
        assert env["HOSTILE"] == "it's `id` $(id) \"\\ \n#SBATCH é中"
        assert "GATEWAY_SECRET" not in env
        for other_role, other_index in tasks:
            other = states[other_role, other_index]
            assert other is not None
            assert env[f"PAI_HOST_IP_{other_role}_{other_index}"] == other.ip
            for label, numbers in other.ports.items():
                name = f"PAI_PORT_LIST_{other_role}_{other_index}_{label}"
                assert env[name] == ",".join(map(str, numbers))
        config = json.loads(env["TF_CONFIG"])
        assert config["task"] == {"type": role, "index": index}
        assert config["cluster"] == json.loads(outputs["ps", 0]["env"]["TF_CONFIG"])["cluster"]
        assert output["address"] == state.ip
    assert outputs["ps", 0]["env"]["CUDA_VISIBLE_DEVICES"] == ""
    gpus = [
        (states["worker", i].host, outputs["worker", i]["env"]["CUDA_VISIBLE_DEVICES"])
        for i in (0, 1)
    ]  # type: ignore[union-attr]
    assert len(set(gpus)) == 2
    assert all(gpu for _, gpu in gpus)
    ports = [port for s in states.values() if s for numbers in s.ports.values() for port in numbers]
    assert len(set(ports)) == len(ports)
    hosts = {task: state.host for task, state in states.items() if state}
    shared = hosts["ps", 0] in (hosts["worker", 0], hosts["worker", 1])
    assert shared == (layout == "packed")


RENDEZVOUS = textwrap.dedent(
    """
    import os, socket, time
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        server = socket.create_server(("0.0.0.0", address[1]))
        peers = [server.accept()[0] for _ in range(size - 1)]
        files = [peer.makefile("rw") for peer in peers]
        total = 1 + sum(int(file.readline()) for file in files)
        for file in files:
            file.write(f"{total}\\n"); file.flush()
    else:
        for _ in range(100):
            try:
                peer = socket.create_connection(address, timeout=20); break
            except ConnectionRefusedError:
                time.sleep(0.1)
        file = peer.makefile("rw")
        file.write(f"{rank + 1}\\n"); file.flush()
        total = int(file.readline())
    print("sum", total, flush=True)
    """
)


@pytest.mark.proves("framework.strategy")
def test_ranks_connect_to_master_addr(batch_harness: BatchHarness) -> None:
    role = {"name": "worker", "taskNumber": 4, "memoryMB": 100, "command": "python3 reduce.py"}
    job = batch_harness.submit(
        {
            "image": "python",
            "framework": {"name": "pytorch", "strategy": "ddp"},
            "taskRoles": [role],
        },
        files={"reduce.py": RENDEZVOUS},
    )
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert [job.log_text("worker", i) for i in range(4)] == ["sum 10\n"] * 4


def role(name: str, command: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "command": command, "memoryMB": 100, **more}


FOREVER = "echo up; sleep 600"
NO_FAILURE_LIMIT = {"minFailedTaskCount": None}


@pytest.mark.parametrize(
    ("roles", "expected", "rule"),
    [
        ([role("a", "sleep 1; exit 3"), role("b", FOREVER)], ("FAILED", "3:0"), "min_failed"),
        (
            [
                role(
                    "a",
                    "exit $((PAI_TASK_INDEX < 2))",
                    taskNumber=3,
                    minFailedTaskCount=3,
                    minSucceededTaskCount=1,
                ),
                role("b", FOREVER),
            ],
            ("COMPLETED", "0:0"),
            "min_succeeded",
        ),
        (
            [role("a", "sleep 1", isMain=True), role("b", FOREVER)],
            ("COMPLETED", "0:0"),
            "min_succeeded",
        ),
        (
            [role("a", "sleep 1; exit 9", isMain=True, **NO_FAILURE_LIMIT), role("b", FOREVER)],
            ("FAILED", "9:0"),
            "min_failed",
        ),
        (
            [
                role("a", "exit 5", **NO_FAILURE_LIMIT),
                role("b", "sleep 1; exit 6", **NO_FAILURE_LIMIT),
            ],
            ("COMPLETED", "0:0"),
            "all_ended",
        ),
        ([role("a", "true", taskNumber=2)], ("COMPLETED", "0:0"), "all_ended"),
    ],
    ids=["minFailed", "minSucceeded", "main completes", "main fails", "all null", "all succeed"],
)
@pytest.mark.proves(
    "taskRoles[].minFailedTaskCount", "taskRoles[].minSucceededTaskCount", "taskRoles[].isMain"
)
def test_completion_rule_ends_the_job(
    batch_harness: BatchHarness, roles: list[dict[str, Any]], expected: tuple[str, str], rule: str
) -> None:
    job = batch_harness.submit({"taskRoles": roles})
    assert job.wait_for_end() == expected
    result = job.script_result()
    assert result.rule == rule
    ends = []
    for role_spec in roles:
        for index in range(role_spec.get("taskNumber", 1)):
            state = job.state(role_spec["name"], index)
            assert state is not None
            assert state.state == "ended"
            ends.append(state.ended or 0)
    assert max(ends) - (result.ended or 0) < 4  # the other tasks ended within seconds


CATCH = textwrap.dedent(
    """
    import signal, sys, time
    def caught(*_):
        print("SIGTERM", flush=True)
        time.sleep(float(sys.argv[1]))
        import csv, decimal, pickle  # not imported before: read from the image after SIGTERM
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, caught)
    print("up", flush=True)
    while True:
        time.sleep(0.1)
    """
)


@pytest.mark.parametrize("how", ["requested", "cancelled"])
@pytest.mark.parametrize("seconds", ["1", "600"], ids=["obeys", "ignores"])
def test_stop_sends_sigterm_to_the_task_process_once(
    batch_harness: BatchHarness, how: str, seconds: str
) -> None:
    job = batch_harness.submit(
        {"image": "python", "taskRoles": [role("w", f"python3 catch.py {seconds}")]},
        files={"catch.py": CATCH},
    )
    job.wait_for_output("w")
    begin = time.monotonic()
    signal_options = ["--batch", f"--signal={STOP_SIGNAL}"] if how == "requested" else []
    job.command("scancel", *signal_options, job.slurm_job_id)
    assert job.wait_for_end()[0] == "CANCELLED"
    took_s = time.monotonic() - begin
    text = job.log_text("w")
    assert text.count("SIGTERM") == 1
    assert ("saved" in text) == (seconds == "1")
    assert took_s < 15
    job.wait_until("the result", lambda: Path(job.paths.path_to("result")).exists(), 10)
    assert job.script_result().outcome == "stopped"


def test_sigterm_for_the_wrapper_alone_reaches_the_program_once(
    batch_harness: BatchHarness,
) -> None:
    """As with proctrack/cgroup, where Slurm signals only the direct children of slurmstepd."""
    job = batch_harness.submit(
        {"image": "python", "taskRoles": [role("w", "python3 catch.py 1")]},
        files={"catch.py": CATCH},
    )
    job.wait_for_output("w")
    wrappers = subprocess.run(
        ["pgrep", "-f", f"task.sh {job.paths.dir} 0 0"], capture_output=True, text=True, check=True
    ).stdout.split()
    parents = {
        pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in wrappers
    }
    wrapper = next(
        pid
        for pid in wrappers
        if parents[pid] not in wrappers and "srun" not in Path(f"/proc/{pid}/comm").read_text()
    )
    os.kill(int(wrapper), signal.SIGTERM)
    job.wait_for_end()
    assert job.log_text("w").count("SIGTERM") == 1
    assert "saved" in job.log_text("w")


@pytest.mark.parametrize("limit", ["1m", "10m"])
@pytest.mark.proves("timeLimit", "gracePeriod")
def test_tasks_get_sigterm_before_the_time_limit(batch_harness: BatchHarness, limit: str) -> None:
    job = batch_harness.submit(
        {
            "image": "python",
            "timeLimit": limit,
            "gracePeriod": "25s",
            "taskRoles": [role("w", "python3 catch.py 0; exit 4")],
        },
        files={"catch.py": CATCH},
    )
    job.wait_for_output("w")
    if limit == "10m":
        # The announcement of `#SBATCH --signal` comes too early: the script asks Slurm for the time left.
        job.command("scancel", "--batch", "--signal=USR1", job.slurm_job_id)
        time.sleep(3)
        assert job.log_text("w").count("SIGTERM") == 0
        update = ["scontrol", "update", f"JobId={job.slurm_job_id}", "TimeLimit=1"]
        subprocess.run(update, env=job.cluster.env, check=True)
        job.command("scancel", "--batch", "--signal=USR1", job.slurm_job_id)
    job.wait_until("the result", lambda: Path(job.paths.path_to("result")).exists(), 70)
    assert (job.script_result().outcome, job.script_result().rule) == ("failed", "time_limit")
    assert job.log_text("w").count("SIGTERM") == 1
    assert "saved" in job.log_text("w")
    assert job.wait_for_end(90)[0] == "TIMEOUT"


def test_checkpoint_directory_is_shared_by_attempts(batch_harness: BatchHarness) -> None:
    command = 'echo "attempt $SLUICE_ATTEMPT restart $SLUICE_RESTART_COUNT"; ls "$CHECKPOINT_DIR"; touch "$CHECKPOINT_DIR/step-1"'
    first = batch_harness.submit({"taskRoles": [role("w", command)]})
    assert first.wait_for_end() == ("COMPLETED", "0:0")
    second = batch_harness.submit({"taskRoles": [role("w", command)]}, attempt_of=first)
    assert second.wait_for_end() == ("COMPLETED", "0:0")
    assert first.log_text("w") == "attempt 1 restart 0\n"
    assert second.log_text("w") == "attempt 2 restart 0\nstep-1\n"


def test_output_is_byte_exact(batch_harness: BatchHarness) -> None:
    octal = "".join(f"\\{n:03o}" for n in range(256))
    command = f"printf '{octal}'; printf '{octal}' >&2; printf 'half a line'"
    job = batch_harness.submit({"taskRoles": [role("w", command)]})
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_path("w").read_bytes() == bytes(range(256)) * 2 + b"half a line"


def test_out_of_memory_is_reported(batch_harness: BatchHarness) -> None:
    program = (
        "import time\nx = bytearray(400 * 1024 * 1024)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    job = batch_harness.submit(
        {"image": "python", "taskRoles": [role("w", "python3 allocate.py")]},
        files={"allocate.py": program},
    )
    state, _ = job.wait_for_end()
    assert state in ("FAILED", "OUT_OF_MEMORY")
    assert job.script_result().reason == "out_of_memory"
    task_state = job.state("w")
    assert task_state is not None
    assert task_state.reason == "out_of_memory"


@pytest.mark.parametrize(
    ("more", "code", "reason"),
    [
        ({"image": "gone.sif"}, "201:0", "image_missing"),
        ({"dataDir": "/no/such/directory"}, "203:0", "mount_missing"),
    ],
)
def test_missing_image_or_directory_fails_before_start(
    batch_harness: BatchHarness, more: dict[str, str], code: str, reason: str
) -> None:
    job = batch_harness.submit({**more, "taskRoles": [role("w", "echo ran")]})
    assert job.wait_for_end() == ("FAILED", code)
    assert job.script_result().is_permanent
    assert job.script_result().reason == reason
    log = job.log_text("w")
    assert "ran" not in log
    assert log.startswith("sluice: there is no ")


@pytest.mark.proves("taskRoles[].portList[].beginAt")
def test_occupied_fixed_port_is_reported(batch_harness: BatchHarness) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - as a job on the node would
        port = server.getsockname()[1]
        ports = [{"label": "web", "beginAt": port}]
        job = batch_harness.submit({"taskRoles": [role("w", "echo ran", portList=ports)]})
        assert job.wait_for_end() == ("FAILED", "204:0")
    assert f"port {port} is already in use" in job.log_text("w")


def test_batch_log_shows_directories_and_commands(batch_harness: BatchHarness) -> None:
    """Names of files only where others may read them; the tasks' logs have only the program's output."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as base:
        data, private = Path(base, "data"), Path(base, "private")
        for directory in (Path(base), data, private):
            directory.mkdir(exist_ok=True)
            directory.chmod(0o755)
        for name in ("train.txt", "escape\x1b[31m", *(f"z{n:02}" for n in range(20))):
            (data / name).touch()
        (private / "diary.txt").touch()
        shutil.chown(private, USER)
        private.chmod(0o700)
        job = batch_harness.submit(
            {
                "dataDir": str(data),
                "outputDir": str(private),
                "jobEnvs": {"PASSWORD": "hunter2"},
                "taskRoles": [
                    role("ps", "printf 'a\\0b'"),
                    role("worker", "cd /\nprintf done", parameters=[{"key": "lr", "value": "0.1"}]),
                ],
            },
            files={"train.py": ""},
        )
        assert job.wait_for_end()[0] == "COMPLETED", job.log_text("batch")
    head = job.log_text("batch")
    assert f"  DATA_DIR={data}\n    entries: 22\n    escape?[31m\n    train.txt\n" in head
    assert "z19" not in head  # only the first ten names
    assert f"  RESULT_DIR={private}\n    entries: 1\n  MODEL_DIR=" in head
    assert "diary" not in head
    assert f"  PAI_CODE_DIR={job.paths.code_dir}\n    entries: 1\n    train.py\n" in head
    assert f"  CHECKPOINT_DIR={job.paths.checkpoint_dir}\n    entries: 0\n" in head
    assert "  command of role ps, tasks: 1\n    printf 'a\\0b'\n" in head
    assert "  command of role worker, tasks: 1\n    cd /\n    printf done --lr=0.1\n" in head
    assert "hunter2" not in head
    assert job.log_path("ps").read_bytes() == b"a\0b"
    assert job.log_path("worker").read_bytes() == b"done"


def test_debug_holds_a_failed_task_until_release(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit({"jobEnvs": {"isDebug": True}, "taskRoles": [role("w", "exit 7")]})

    def is_in_debug_state() -> bool:
        state = job.state("w")
        return state is not None and state.state == "debug" and state.exit_code == 7

    job.wait_until("the debug state", is_in_debug_state)
    assert job.slurm()[0] == "RUNNING"
    Path(job.paths.path_to("release")).touch()
    assert job.wait_for_end() == ("FAILED", "7:0")


def test_requeued_job_reports_its_restart_count(batch_harness: BatchHarness) -> None:
    job = batch_harness.submit(
        {"taskRoles": [role("w", "echo up $SLUICE_SLURM_RESTART_COUNT; sleep 600")]}
    )
    job.wait_for_output("w")
    subprocess.run(["scontrol", "requeue", job.slurm_job_id], env=job.cluster.env, check=True)
    first = job.log_path("w").stat().st_size

    def start_requested() -> bool:
        """Slurm rejects the update while the job is completing."""
        update = ["scontrol", "update", f"JobId={job.slurm_job_id}", "StartTime=now"]
        return not subprocess.run(update, env=job.cluster.env, capture_output=True).returncode

    def is_restarted() -> bool:
        state = job.state("w")
        return state is not None and state.restart_count == 1 and state.state == "running"

    # Slurm delays a requeued job by two minutes, because a node rejects a credential created in the same second
    # as the revoked one ("Job credential revoked" ends the job). A few seconds suffice.
    job.wait_until("the pending state", lambda: job.slurm()[0] == "PENDING")
    time.sleep(3)
    job.wait_until("the new start time", start_requested)
    job.wait_until("the restart", is_restarted)
    state = job.state("w")
    assert state is not None
    assert state.log_offset >= first > 0


def test_registry_image_is_fetched_once_and_reported_as_pulling(
    batch_harness: BatchHarness, tmp_path: Path
) -> None:
    """A script replaces `apptainer pull`, because no registry is available."""
    real = shutil.which("apptainer", path=batch_harness.cluster.env["PATH"])
    root = Path(batch_harness.root) / f"fetch-{uuid.uuid4()}"
    program = root / "apptainer"
    batch_harness.write(str(root / "1"), {})
    program.write_text(
        f'#!/bin/bash\nif [[ $1 == pull ]]; then echo "pull $3" >>{root}/pulls; [[ $3 != */slow* ]] || sleep 600\n'
        f'sleep 2; exec cp {batch_harness.cluster.images}/busybox.sif "$2"; fi\n'
        f'exec {real} "$@"\n'
    )
    program.chmod(0o755)
    os.chown(root, pwd.getpwnam(USER).pw_uid, -1)
    options = {"runtime_program": str(program), "image_cache_dir": f"{root}/cache"}
    jobs = [
        batch_harness.submit(
            {"image": "org/app:1.0", "taskRoles": [role("w", "echo ran")]}, **options
        )
        for _ in range(2)
    ]

    slow = batch_harness.submit(
        {"image": "org/slow:1.0", "taskRoles": [role("w", "echo ran")]}, **options
    )

    def pulling(job: SubmittedAttempt, image: str) -> bool:
        state = job.state("w")
        return state is not None and state.state == "pulling" and state.image == image

    jobs[0].wait_until("the pulling state", lambda: pulling(jobs[0], "org/app:1.0"))
    slow.wait_until("the pulling state", lambda: pulling(slow, "org/slow:1.0"))
    slow.command("scancel", "--batch", f"--signal={STOP_SIGNAL}", slow.slurm_job_id)
    assert [job.wait_for_end() for job in jobs] == [("COMPLETED", "0:0")] * 2
    assert slow.wait_for_end()[0] == "CANCELLED"
    assert slow.script_result().outcome == "stopped"
    pulls = (root / "pulls").read_text().splitlines()
    assert sorted(pulls) == ["pull docker://org/app:1.0", "pull docker://org/slow:1.0"]
    shutil.rmtree(root)
