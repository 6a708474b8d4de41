"""The client library and the `sluice` command against a real server and cluster, with containers."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sluice
from tests.sluice_server import RunningSluice

pytestmark = pytest.mark.cluster
CLIENT = Path(__file__).resolve().parents[2] / "client" / "src"
TIMEOUT_S = 240
CliResult = subprocess.CompletedProcess[str]

# An FfDL/Prophecis manifest with this cluster's image and directory.
MANIFEST = """\
name: tf-convolutional-network-tutorial
description: Convolutional network model using tensorflow
version: "1.0"
gpus: 1
cpus: 1
memory: 1Gb
namespace: default
code_selector: codeFile
data_stores:
  - id: hostmount
    type: mount_volume
    training_data:
      container: data
    training_results:
      container: result
    connection:
      type: host_mount
      name: "host-mount"
      path: "{path}"
framework:
  name: "python"
  version: ""
  command: >
    python3 ${{MODEL_DIR}}/tf-model/convolutional_network.py --trainImagesFile ${{DATA_DIR}}/train-images.txt
      --learningRate 0.001
      --trainingIters 3
"""
TRAINING_SCRIPT = """\
import argparse, os, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--trainImagesFile")
parser.add_argument("--learningRate", type=float)
parser.add_argument("--trainingIters", type=int)
given = parser.parse_args()
print("read", pathlib.Path(given.trainImagesFile).read_text().strip(), flush=True)
for step in range(given.trainingIters):
    print(f"iteration {step} rate {given.learningRate}", flush=True)
pathlib.Path(os.environ["RESULT_DIR"], "model.txt").write_text("weights")
print("done: Größe 世界", flush=True)
"""


class CliUser:
    """A user of the `sluice` command with a private home directory."""

    def __init__(self, sluice_server: RunningSluice, home: Path, name: str = "alice") -> None:
        self.sluice_server, self.home, self.name = sluice_server, home, name
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(CLIENT),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
        }

    def run(self, *arguments: str, stdin: str = "", **env: str) -> CliResult:
        return subprocess.run(
            [sys.executable, "-m", "sluice", *arguments],
            env={**self.env, **env},
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.home,
            timeout=TIMEOUT_S,
        )

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return json.loads(done.stdout)

    def login(self) -> CliResult:
        password = self.sluice_server.passwords[self.name] + "\n"
        return self.run(
            "login", self.sluice_server.url, "--user", self.name, "--password-stdin", stdin=password
        )

    def write(self, name: str, text: str) -> str:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name


@pytest.fixture(scope="module")
def alice(sluice_server: RunningSluice, tmp_path_factory: pytest.TempPathFactory) -> CliUser:
    user = CliUser(sluice_server, tmp_path_factory.mktemp("alice"))
    done = user.login()
    assert done.returncode == 0, done.stderr
    return user


@pytest.fixture(scope="module")
def client(sluice_server: RunningSluice) -> Iterator[sluice.Client]:
    with sluice.Client(sluice_server.url, sluice_server.token("alice")) as new_client:
        yield new_client


def job_file(command: str, name: str = "job", **more: Any) -> dict[str, Any]:
    return {
        "jobName": name,
        "image": "python",
        "taskRoles": [{"name": "main", "command": command, **more}],
    }


def shared_directory(cluster: Any) -> Path:
    """Create a shared data directory; alice's tasks may write to its subdirectory `result`."""
    directory = Path(cluster.dir) / "shared" / "prophecis-data"
    for name in ("data", "result"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "data" / "train-images.txt").write_text("60000 pictures\n")
    shutil.chown(directory / "result", "sluice-alice")
    return directory


# --- a new user -----------------------------------------------------------------------------------


def test_login_stores_a_token_and_logout_revokes_it(
    sluice_server: RunningSluice, tmp_path: Path
) -> None:
    bob = CliUser(sluice_server, tmp_path, "bob")
    wrong = bob.run(
        "login", sluice_server.url, "--user", "bob", "--password-stdin", stdin="wrong\n"
    )
    assert (wrong.returncode, wrong.stdout) == (3, "")
    assert bob.login().returncode == 0
    config_file = tmp_path / ".config" / "sluice" / "config.toml"
    assert config_file.stat().st_mode & 0o777 == 0o600
    assert bob.json("me")["username"] == "bob"
    tokens = bob.json("tokens")
    assert [token["is_current"] for token in tokens].count(True) == 1
    token = config_file.read_text().split('token = "')[1].split('"')[0]
    assert bob.run("logout").returncode == 0
    assert not config_file.exists()
    revoked = bob.run("me", SLUICE_URL=sluice_server.url, SLUICE_TOKEN=token)
    assert revoked.returncode == 3
    assert "sluice login" in revoked.stderr


def test_legacy_environment_variables_sign_in(sluice_server: RunningSluice, tmp_path: Path) -> None:
    user = CliUser(sluice_server, tmp_path)
    env = {
        "DLAAS_URL": sluice_server.url,
        "MLSS_AUTH_USER": "alice",
        "MLSS_AUTH_PASSWD": base64.b64encode(sluice_server.passwords["alice"].encode()).decode(),
        "MLSS_AUTH_TYPE": "UM",
    }
    for _time in range(2):
        done = user.run("list", "--json", **env)
        assert done.returncode == 0, done.stderr
        assert isinstance(json.loads(done.stdout), list)


def test_initialized_example_is_trained_and_downloaded(alice: CliUser) -> None:
    assert alice.run("init", "digits").returncode == 0
    done = alice.run("train", "digits/manifest.yml", "digits/code")
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["epoch", str(n)] for n in range(1, 6)]
    assert "RUNNING" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("COMPLETED")
    rows = alice.run("emetrics", "digits", "--json").stdout.splitlines()
    assert [json.loads(row)["meta"]["epoch"] for row in rows] == [1, 2, 3, 4, 5]
    fetched = alice.json("download", "digits", "--directory", "--filename", "model")
    assert (alice.home / "model" / "model.json").exists(), fetched


def test_legacy_manifest_is_trained(alice: CliUser, cluster: Any) -> None:
    directory = shared_directory(cluster)
    alice.write("manifest.yml", MANIFEST.format(path=directory))
    alice.write("project/tf-model/convolutional_network.py", TRAINING_SCRIPT)
    done = alice.run("train", "manifest.yml", "project")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout == (
        "read 60000 pictures\n"
        "iteration 0 rate 0.001\niteration 1 rate 0.001\niteration 2 rate 0.001\n"
        "done: Größe 世界\n"
    )
    job = alice.json("show", "tf-convolutional-network-tutorial")
    assert (job["state"], job["gpus"]) == ("COMPLETED", 1)
    assert [task["state"] for task in job["task_list"]] == ["succeeded"]
    check_downloads(alice, job["id"])
    numbered = alice.run("loglines", job["id"]).stdout.splitlines()
    assert numbered[0] == "worker-0      1  read 60000 pictures"


def check_downloads(alice: CliUser, job_id: str) -> None:
    """Archives with the names of FfDL's command, a file name of one's own, a directory, a single file."""
    code = ["code/tf-model/convolutional_network.py", "job.yaml"]
    for options, name, content in (
        (["--trainedmodel"], f"{job_id}-trainedmodel.zip", ["model.txt"]),
        (["--definition"], f"{job_id}-definition.zip", code),
        (["--definition", "--filename", "mine"], "mine", code),
    ):
        fetched = alice.json("download", job_id, *options)
        assert fetched == {"target": name, "files": [name]}
        with zipfile.ZipFile(alice.home / name) as archive:
            assert sorted(archive.namelist()) == content
    assert not list(alice.home.glob("*.files"))
    results = alice.json("download", job_id, "--directory", "--filename", "results")
    assert results["files"] == ["results/model.txt"]
    assert (alice.home / "results" / "model.txt").read_text() == "weights"
    alice.json("download", job_id, "--path", "model.txt")
    assert (alice.home / "model.txt").read_text() == "weights"
    alice.json("download", job_id, "--filename", "results.tar")
    with tarfile.open(alice.home / "results.tar") as archive:
        assert any(name.endswith("model.txt") for name in archive.getnames())
    refused = alice.run("download", job_id, "--filename", "results.tar.gz")
    assert (refused.returncode, ".zip or .tar" in refused.stderr) == (1, True)


# --- jobs -------------------------------------------------------------------------------------------


def test_failed_job_gives_nonzero_exit_code(alice: CliUser) -> None:
    alice.write("fails.json", json.dumps(job_file("echo before; exit 7", "fails")))
    done = alice.run("submit", "fails.json", "--follow")
    assert done.returncode == 1
    assert done.stdout == "before\n"
    assert done.stderr.splitlines()[-1].startswith("FAILED")
    assert "7" in done.stderr.splitlines()[-1]


def test_json_option_prints_only_json(alice: CliUser) -> None:
    alice.write("prints.json", json.dumps(job_file("echo one; echo two", "prints")))
    done = alice.run("train", "prints.json", "--json")
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["submitted", "end"]
    assert [row["text"] for row in events if row["event"] == "log"] == ["one", "two"]
    assert events[-1]["job"]["state"] == "COMPLETED"


def test_invalid_job_file_lists_paths(alice: CliUser) -> None:
    wrong = {"jobName": "x", "image": "python", "taskRoles": [{"name": "a", "cpuNumber": "many"}]}
    alice.write("wrong.json", json.dumps(wrong))
    done = alice.run("submit", "wrong.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "taskRoles[0].cpuNumber" in done.stderr
    assert "taskRoles[0].command" in done.stderr
    huge = job_file("true", "huge", gpuNumber=99)
    alice.write("huge.json", json.dumps(huge))
    planned = alice.run("plan", "huge.json")
    assert planned.returncode == 1
    assert "GPU" in planned.stderr
    good = alice.json("plan", "prints.json")
    assert good["ok"] is True
    assert good["script"].startswith("#!/bin/bash")


def test_ctrl_c_detaches_without_stopping_the_job(alice: CliUser) -> None:
    command = "for i in 1 2 3 4 5 6 7 8; do echo tick $i; sleep 1; done"
    alice.write("ticks.json", json.dumps(job_file(command, "ticks")))
    process = subprocess.Popen(
        [sys.executable, "-m", "sluice", "train", "ticks.json"],
        env=alice.env,
        cwd=alice.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "tick 1\n"
    process.send_signal(signal.SIGINT)
    _rest, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "the job continues" in stderr
    assert "Traceback" not in stderr
    job = alice.json("show", "ticks")
    assert f"sluice attach {job['id']}" in stderr
    back = alice.run("attach", job["id"])
    assert back.returncode == 0
    assert back.stdout == "".join(f"tick {n}\n" for n in range(1, 9))


def test_log_lines_are_prefixed_with_the_task(alice: CliUser) -> None:
    spec = job_file("echo hello from $PAI_TASK_INDEX", "many", taskNumber=3)
    alice.write("many.json", json.dumps(spec))
    done = alice.run("submit", "many.json", "--follow", "--all")
    assert done.returncode == 0, done.stderr
    expected = [f"main-{n} | hello from {n}" for n in range(3)]
    assert sorted(done.stdout.splitlines()) == expected
    assert sorted(alice.run("logs", "many", "--all").stdout.splitlines()) == expected


def test_jobs_are_stopped_cloned_and_deleted(alice: CliUser) -> None:
    alice.write("long.json", json.dumps(job_file("sleep 600", "long")))
    id = alice.run("submit", "long.json").stdout.strip()
    assert alice.run("halt", id).returncode == 0
    waited = alice.run("wait", id[:10], "--timeout", "120")
    assert (waited.returncode, waited.stdout) == (1, "STOPPED\n")
    copy = alice.run("clone", id, "--name", "long-two").stdout.strip()
    assert alice.json("show", copy)["cloned_from"] == id
    alice.run("limit", copy, "20m")
    deleted = alice.run("delete", copy, id)
    assert deleted.returncode == 0, deleted.stderr
    assert alice.run("show", id).returncode == 1


def test_template_is_created_submitted_and_deleted(alice: CliUser) -> None:
    spec = job_file("echo rate <% $parameters.rate %>", "from-template")
    alice.write("template.json", json.dumps(spec))
    created = alice.run("template", "create", "rates", "--file", "template.json", "-p", "rate=0.1")
    assert created.returncode == 0, created.stderr
    assert [row["name"] for row in alice.json("template", "list", "rates")] == ["rates"]
    done = alice.run("template", "submit", "rates", "-p", "rate=0.5", "--follow")
    assert (done.returncode, done.stdout) == (0, "rate 0.5\n"), done.stderr
    assert alice.run("template", "delete", "rates").returncode == 0


def test_capacity_command_lists_gpu_types(alice: CliUser) -> None:
    free = alice.json("capacity")
    assert {gpu["type"] for gpu in free["clusters"][0]["gpus"]} == {"a100", "v100"}
    shown = alice.run("capacity").stdout
    assert "a100" in shown


# --- the library ------------------------------------------------------------------------------------


def test_log_follow_survives_server_restart(
    sluice_server: RunningSluice, client: sluice.Client
) -> None:
    count = 60
    command = f"for i in $(seq {count}); do echo line $i; sleep 0.3; done"
    job = client.submit(job_file(command, "survives"))
    received: list[bytes] = []
    states: list[str] = []
    reader = threading.Thread(target=lambda: received.extend(client.logs(job, follow=True)))
    watcher = threading.Thread(
        target=lambda: client.wait(job, on_change=lambda changed: states.append(changed.state))
    )
    reader.start()
    watcher.start()
    deadline = time.monotonic() + TIMEOUT_S
    while b"line 3\n" not in b"".join(received):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    sluice_server.stop()
    time.sleep(1)
    sluice_server.start()
    reader.join(TIMEOUT_S)
    watcher.join(TIMEOUT_S)
    assert b"".join(received) == b"".join(b"line %d\n" % n for n in range(1, count + 1))
    assert states[-1] == "COMPLETED"


def test_same_idempotency_key_creates_one_job(client: sluice.Client) -> None:
    file = job_file("true", "once")
    key = f"key-{time.time_ns()}"
    first, second = client.submit(file, key=key), client.submit(file, key=key)
    assert first.id == second.id
    with pytest.raises(sluice.Conflict):
        client.submit(job_file("false", "once"), key=key)
    client.wait(first, timeout=TIMEOUT_S)


def test_logs_and_downloads_are_byte_exact(client: sluice.Client, tmp_path: Path) -> None:
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 1000)"
    job = client.wait(client.submit(job_file(f"python3 -c '{script}'", "bytes")), timeout=TIMEOUT_S)
    assert job.completed
    expected = bytes(range(256)) * 1000
    assert client.logs(job).read() == expected
    assert client.logs(job, follow=True).read() == expected
    assert client.logs(job, offset=-256).read() == bytes(range(256))
    fetched = client.download(job, "logs/main-0.log", tmp_path)
    assert fetched.read_bytes() == expected
    tar = client.download_tar(job, tmp_path / "all.tar", root="work")
    with tarfile.open(tar) as archive:
        assert any(name.endswith("main-0.log") for name in archive.getnames())


def test_outsider_and_read_token_are_rejected(
    sluice_server: RunningSluice, client: sluice.Client
) -> None:
    job = client.submit(job_file("true", "mine"))
    with sluice.Client(sluice_server.url, sluice_server.token("carol")) as carol:
        with pytest.raises(sluice.NotFound):
            carol.show(job)
        with pytest.raises(sluice.NotFound):
            carol.logs(job, "main", follow=True).read()
        with pytest.raises(sluice.SluiceError):
            carol.submit(job_file("true"))
    with sluice.Client(sluice_server.url, sluice_server.token("alice", "read")) as reader:
        assert reader.show(job).id == job.id
        with pytest.raises(sluice.Forbidden) as caught:
            reader.stop(job)
    assert "may only read" in caught.value.message
    client.wait(job, timeout=TIMEOUT_S)


# --- directories and names ----------------------------------------------------------------------------


def test_octopus_job_keeps_its_model_and_its_results(
    client: sluice.Client, alice: CliUser, sluice_server: RunningSluice, tmp_path: Path
) -> None:
    command = 'echo weights >/model/save.pth; echo score >"$PAI_OUTPUT_DIR/score.txt"; echo other >other.txt'
    octopus = {
        "name": "octopus-results",
        "image": "busybox",
        "config": [{"name": "main", "command": command, "taskNumber": 1}],
    }
    job = client.wait(client.submit(octopus, unique_name=True), timeout=TIMEOUT_S)
    assert job.state == "COMPLETED", job.reason
    assert [file.name for file in client.files(job, root="model")] == ["save.pth"]
    client.download_tree(job, tmp_path / "results")
    assert (tmp_path / "results" / "score.txt").read_text() == "score\n"
    done = alice.run("download", job.id, "--root", "model", "--directory", "--filename", "model")
    assert done.returncode == 0, done.stderr
    assert (alice.home / "model" / "save.pth").read_text() == "weights\n"
    # A member of the namespace may read the job's own directories.
    listed = sluice_server.api("GET", f"jobs/{job.id}/files?root=output", "bob")
    assert [item["name"] for item in listed.json()["items"]] == ["score.txt"]


def test_too_large_code_directory_is_named_in_the_reason(
    client: sluice.Client, cluster: Any
) -> None:
    directory = Path(cluster.dir) / "shared" / "large-code"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "data.bin").open("wb") as file:
        file.truncate(512 * 2**20)
    spec = {**job_file("true", "large-code"), "codeDir": str(directory), "retryCount": 3}
    job = client.wait(client.submit(spec, unique_name=True), timeout=TIMEOUT_S)
    assert job.state == "FAILED"
    assert "513 MB; at most 200 MB" in job.reason.text
    assert len(client.attempts(job)) == 1  # a retry would fail the same way


def test_refused_paths_and_used_names_are_explained(alice: CliUser, client: sluice.Client) -> None:
    spec = {**job_file("true", "paths"), "dataDir": "hdfs://namenode:9000/set"}
    path = alice.write("paths.json", json.dumps(spec))
    planned = alice.run("plan", path)
    assert planned.returncode == 1
    assert "hdfs://namenode:9000/set is not a directory of the cluster" in planned.stderr
    assert "map hdfs://namenode:9000 to a directory" in planned.stderr
    chinese = alice.run("plan", path, LANG="zh_CN.UTF-8", LC_ALL="zh_CN.UTF-8")
    assert "不是集群上的目录" in chinese.stderr

    path = alice.write("names.json", json.dumps(job_file("true", "used-name")))
    first = client.wait(
        alice.run("submit", path, "--unique-name").stdout.strip(), timeout=TIMEOUT_S
    )
    again = alice.run("submit", alice.write("again.json", json.dumps(job_file("true", first.name))))
    assert again.returncode == 0
    assert "an earlier job of yours has this name" in again.stderr
    unique = alice.run("submit", path, "--unique-name")
    assert "Warning" not in unique.stderr
    assert client.show(unique.stdout.strip()).name != first.name
    cloned = client.clone(first)
    assert cloned.name not in (first.name, client.show(unique.stdout.strip()).name)
