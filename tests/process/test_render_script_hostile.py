"""Hostile job files are rejected, or a real shell receives their values unchanged.

Hypothesis chooses a seed per batch of job files. One bash parses all scripts of a batch, another one runs them.
5,000 job files in total; fewer with --fast.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.plan import PlanError
from jobs.script.paths import AttemptPaths
from jobs.script.render import RUNTIMES, RenderError
from tests.example_counts import scale_examples
from tests.unit.jobs.rendering import SHELL, TASK_FUNCTIONS, render_job

SPECS = scale_examples(5000)
BATCH = 250
BATCH_FUNCTIONS = (SHELL / "batch.sh").read_text()

HOSTILE_TEXTS = (
    "'", '"', "`id`", "$(touch /tmp/pwned)", "${HOME}", "$HOME", "\\", "\n", "\r\n", "\t", ";", "&&", "|", "#",
    "\n#SBATCH --uid=0\n", "EOF\n", "!", "*", "?", "[a]", "{a,b}", "~", "~/", "-", "--", "=", "%s", "%n",
    "\x1b[31m", "\x7f", "é", "中文", "\u2028", "😀", "a b", " ", "", "$IFS", "<(x)", ">x", "\\'", "'\\''",
    "$'\\n'", "A=1", "a,b=c", ":", "..", "/", "$((1/0))", "${x:?}", "\\\n",
)  # fmt: skip


REJECTED_TEXTS = ("\x00", "\ud800", "x" * 200_000)


def hostile_text(rng: random.Random, max_parts: int = 6) -> str:
    text = "".join(rng.choice(HOSTILE_TEXTS) for _ in range(rng.randint(0, max_parts)))
    if rng.random() < 0.01:
        return text + rng.choice((*REJECTED_TEXTS, "x" * 100_000))
    return text * rng.choice((1, 1, 1, 1, 20))


# Uses only builtins of the shell, because a job file may set PATH and LD_PRELOAD to any value.
PRINT_ENVIRONMENT = (
    "while IFS= read -rd '' v; do printf '%s\\0' \"$v\"; done </proc/self/environ >env.out\n"
)


def role_or_job_name(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return hostile_text(rng, 2)
    return "".join(rng.choice("abzAZ059._~-") for _ in range(rng.randint(1, 9)))


def variable_name(rng: random.Random) -> str:
    # Excludes BASH_ENV, which bash evaluates, and PS4, which bash ignores as root.
    special = ("PATH", "LD_PRELOAD", "IFS", "UID", "_", "dir", "p", "index", "ENV", "LANG", "HOME")
    return rng.choice(special) if rng.random() < 0.3 else "V" + "".join(rng.choices("AB_9z", k=3))


def job(rng: random.Random) -> dict[str, Any]:
    def environment() -> dict[str, Any]:
        return {variable_name(rng): hostile_text(rng) for _ in range(rng.randint(0, 3))}

    def role(number: int) -> dict[str, Any]:
        return {
            "name": role_or_job_name(rng) if rng.random() < 0.5 else f"r{number}",
            "taskNumber": rng.choice((1, 2, 3)),
            "gpuNumber": rng.choice((0, 0, 1)),
            "command": PRINT_ENVIRONMENT + "printf '%s\\0'",
            "parameters": [
                {"key": rng.choice(("lr", "a.b", "x-y", "9")), "value": hostile_text(rng)}
                for _ in range(rng.randint(0, 2))
            ],
            "portList": [{"label": role_or_job_name(rng)}] if rng.random() < 0.3 else [],
            "env": environment(),
        }

    def path() -> str:
        return rng.choice(
            (
                "",
                "",
                "/data/x",
                "/d/" + hostile_text(rng, 2),
                "~/" + hostile_text(rng, 2),
                hostile_text(rng, 2),
            )
        )

    return {
        "jobName": role_or_job_name(rng) if rng.random() < 0.1 else "j",
        "image": "x" if rng.random() < 0.8 else hostile_text(rng, 2),
        "dataDir": path(),
        "outputDir": path(),
        "jobEnvs": environment(),
        "mounts": [{"source": path(), "target": path()}] if rng.random() < 0.2 else [],
        "taskRoles": [role(i) for i in range(rng.randint(1, 2))],
    }


def render_batch(seed: int, root: Path) -> list[tuple[dict[str, Any], dict[str, str], Path]]:
    """Generate one batch of job files and render those that are accepted."""
    rng = random.Random(seed)
    accepted = []
    for number in range(BATCH):
        raw = job(rng)
        runtime = rng.choice((*RUNTIMES, "none", "none"))
        paths = AttemptPaths(str(root), f"s{number}", 1)
        try:
            accepted.append((raw, render_job(raw, paths, runtime=runtime), Path(paths.dir)))
        except (ValidationError, PlanError, RenderError):
            continue
    return accepted


def check_syntax(rendered: list[dict[str, str]], root: Path) -> None:
    """Parse all scripts with one `bash -n`, each wrapped in a function."""
    parts = []
    for number, rendered_job in enumerate(rendered):
        for path, text in rendered_job.items():
            if path in ("batch.sh", "roles.sh"):
                text = text.removesuffix(BATCH_FUNCTIONS)
                parts.append(f"f{number}() {{\n:\n{text}\n}}\n")
    file = root / "all.sh"
    file.write_text("".join(parts))
    checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def _port_labels(role: dict[str, Any]) -> list[str]:
    return [port["label"] for port in role["portList"]]


def check_environment_and_arguments(
    accepted: list[tuple[dict[str, Any], dict[str, str], Path]], root: Path
) -> None:
    """Run the functions of task.sh, then enter.sh, for the first task of each job, all in one bash."""
    functions = root / "task_functions.sh"
    functions.write_text(TASK_FUNCTIONS)
    driver = ["export HOME=/h SLURM_PROCID=0 SLURMD_NODENAME=n1\n"]
    for raw, rendered_job, attempt_dir in accepted:
        attempt_dir.mkdir(parents=True)
        (attempt_dir / "roles.sh").write_text(rendered_job["roles.sh"])
        peers = [
            f"{role['name']} {index} n1 10.0.0.1 "
            + "".join(f"{label}:20000;" for label in ("http", "ssh", *_port_labels(role)))
            for role in raw["taskRoles"]
            for index in range(role["taskNumber"])
        ]
        (attempt_dir / "peers.0").write_text("\n".join(peers) + "\n")
        driver.append(
            f"(set -- {attempt_dir} 0 0; . {functions}; read_peers && build_environment || exit\n"
            f" printf '%s\\n' \"${{environment[@]}}\" >{attempt_dir}/environment)\n"
            f"/bin/sh {SHELL}/enter.sh {attempt_dir} <{attempt_dir}/environment >{attempt_dir}/arguments.out 2>/dev/null\n"
        )
    (root / "driver.sh").write_text("".join(driver))
    subprocess.run(
        ["/bin/bash", str(root / "driver.sh")], check=True, env={"PATH": "/usr/bin:/bin"}
    )
    for raw, _, attempt_dir in accepted:
        role = raw["taskRoles"][0]
        actual_env = dict(
            entry.partition(b"=")[::2]
            for entry in (attempt_dir / "env.out").read_bytes().split(b"\0")
        )
        for key, value in {**raw["jobEnvs"], **role["env"]}.items():
            assert actual_env[key.encode()] == value.encode(), (key, value)
        arguments = (attempt_dir / "arguments.out").read_bytes().split(b"\0")[:-1]
        expected = [f"--{p['key']}={p['value']}".encode() for p in role["parameters"]]
        assert arguments == (expected or [b""])


@settings(
    max_examples=max(1, SPECS // BATCH),
    deadline=None,
    database=None,
    derandomize=True,
    # No shrinking, which would run hundreds of batches: the seed identifies a failing batch.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**63))
def test_hostile_values_reach_the_task_unchanged(seed: int) -> None:
    root = Path(tempfile.mkdtemp(prefix="sluice-hostile-"))
    try:
        accepted = render_batch(seed, root)
        assert len(accepted) > BATCH // 5
        check_syntax([rendered_job for _, rendered_job, _ in accepted], root)
        check_environment_and_arguments(accepted, root)
        assert not Path("/tmp/pwned").exists()
    finally:
        shutil.rmtree(root)
