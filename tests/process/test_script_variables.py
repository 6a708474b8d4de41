"""shell/task.sh expands variables to the same values as `evaluate_expression`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.jobfile import JobSpec
from jobs.jobfile.frameworks import STRATEGIES, Strategy, build_roles
from jobs.script.expressions import (
    CurrentHost,
    CurrentIndex,
    CurrentPort,
    CurrentPorts,
    Expression,
    HostList,
    HostSlots,
    LiteralText,
    TaskHost,
    TaskPort,
)
from jobs.script.paths import AttemptPaths
from jobs.script.quoting import quote
from jobs.script.role_data import render_parts
from jobs.script.variables import build_runtime_variables, build_static_variables, list_task_ports
from tests.example_counts import scale_examples
from tests.unit.jobs.evaluation import TaskAddresses, evaluate_expression, evaluate_family
from tests.unit.jobs.rendering import SHELL, TASK_FUNCTIONS, format_peers, render_job
from tests.unit.jobs.strategies import texts

ROLES = {"ps": 1, "a.b-c~": 3}
LABELS = ("http", "x.y")
ADDRESSES = TaskAddresses(
    # Two tasks of one role, and tasks of both roles, are on the same host.
    hosts={role: [f"10.0.0.{i // 2}" for i in range(count)] for role, count in ROLES.items()},
    ports={
        role: [{"http": [2000 + i], "x.y": [3000 + i, 4000 + i]} for i in range(count)]
        for role, count in ROLES.items()
    },
)

labels = st.sampled_from(LABELS)
tasks = st.sampled_from([(role, i) for role, count in ROLES.items() for i in range(count)])
affixes = st.sampled_from(["", '"', "'", ":4", "[", "$(id)", "\\"])
parts = st.one_of(
    texts.map(LiteralText),
    tasks.map(lambda task: TaskHost(*task)),
    st.builds(lambda task, label: TaskPort(task[0], task[1], label), tasks, labels),
    st.builds(HostList, st.sampled_from(list(ROLES)), st.just("") | labels, affixes, affixes),
    st.lists(st.tuples(st.sampled_from(list(ROLES)), st.integers(1, 8)), min_size=1, max_size=3)
    .map(tuple)
    .map(HostSlots),
    st.integers(0, 100).map(CurrentIndex),
    st.just(CurrentHost()),
    labels.map(CurrentPort),
    labels.map(CurrentPorts),
)


def expand_in_shell(
    attempt_dir: Path, role: int, index: int, roles_text: str, addresses: TaskAddresses
) -> dict[str, str]:
    """The variables that task.sh passes to enter.sh, as evaluated by a shell."""
    (attempt_dir / "roles.sh").write_text(roles_text)
    (attempt_dir / "peers.0").write_text(format_peers(addresses))
    (attempt_dir / "functions.sh").write_text(TASK_FUNCTIONS)
    (attempt_dir / "sshd.sh").write_text((SHELL / "sshd.sh").read_text())
    script = (
        ". ./functions.sh; read_peers && build_environment || exit\n"
        'for line in "${environment[@]}"; do eval "$line"; [[ $line != unset* ]] || continue\n'
        "name=${line%%=*} name=${name#export }\n"
        """printf '%s=%s\\0' "$name" "${!name}"; done"""
    )
    done = subprocess.run(
        ["bash", "-c", script, "task.sh", str(attempt_dir), str(role), "0"],
        cwd=attempt_dir,
        env={
            "PATH": "/usr/bin:/bin",
            "SLURM_PROCID": str(index),
            "SLURMD_NODENAME": "n1",
            "HOME": "/h",
        },
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    entries = done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return dict(entry.partition("=")[::2] for entry in entries)


@settings(
    max_examples=scale_examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.lists(parts, max_size=6).map(tuple), min_size=1, max_size=20), tasks)
def test_shell_expands_expressions_like_evaluate_expression(
    tmp_path: Path, expressions: list[Expression], task: tuple[str, int]
) -> None:
    role, index = task
    templates = [f"template V{i} {render_parts(e)}" for i, e in enumerate(expressions)]
    roles_text = "\n".join(
        [
            f"task_count={sum(ROLES.values())}",
            f"role_settings() {{ role_name={quote(role)} role_tasks={ROLES[role]}; }}",
            "slurm_variables=0 srun_mpi=0 ssh_mode=off has_secrets=0",
            "role_variables() {",
            *templates,
            "}",
            "role_commands() { pre_command= command= post_command= framework_server= starts_server=0; }",
        ]
    )
    actual = expand_in_shell(tmp_path, 0, index, roles_text, ADDRESSES)
    for number, expression in enumerate(expressions):
        expected = evaluate_expression(expression, ADDRESSES, role=role, index=index)
        assert actual[f"V{number}"] == expected


def addresses_of(spec: JobSpec) -> TaskAddresses:
    hosts = {
        role.name: [f"10.{position}.0.{i}" for i in range(role.task_number)]
        for position, role in enumerate(spec.task_roles)
    }
    ports = {
        role.name: [
            {
                port.label: [3000 + 100 * i + 10 * place + n for n in range(port.port_number)]
                for place, port in enumerate(list_task_ports(role))
            }
            for i in range(role.task_number)
        ]
        for role in spec.task_roles
    }
    return TaskAddresses(hosts, ports)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda row: f"{row.framework}-{row.name}")
def test_shell_expands_the_variables_of_every_framework(tmp_path: Path, strategy: Strategy) -> None:
    counts = {
        part: 1 if part == "chief" else 2 for part in (*strategy.required, *strategy.optional)
    }
    roles = build_roles(
        strategy.framework,
        strategy.name,
        command="true",
        counts=counts,
        resources={"*": {"memory_mb": 100, "port_list": [{"label": "grpc", "portNumber": 2}]}},
    )
    spec = JobSpec.model_validate(
        {
            "jobName": "j",
            "image": "i",
            "framework": {"name": strategy.framework, "strategy": strategy.name},
            "jobEnvs": {"TEXT": "it's\n$HOME"},
            "taskRoles": [role.model_dump(by_alias=True) for role in roles],
        }
    )
    addresses = addresses_of(spec)
    paths = AttemptPaths(str(tmp_path), "j", 1)
    rendered = render_job(spec.model_dump(by_alias=True), paths)
    runtime = build_runtime_variables(spec)
    for position, role in enumerate(spec.task_roles):
        index = role.task_number - 1
        expected = build_static_variables(spec, user="alice", training_id="j")[role.name]
        expected.pop("PAI_DEFAULT_FS_URI")
        for family in runtime.families:
            expected |= evaluate_family(family, addresses)
        for variable in (*runtime.shared, *runtime.by_role[role.name]):
            expected[variable.name] = evaluate_expression(
                variable.value, addresses, role=role.name, index=index
            )
        actual = expand_in_shell(tmp_path, position, index, rendered["roles.sh"], addresses)
        assert {name: actual.get(name) for name in expected} == expected
        assert actual["PAI_DEFAULT_FS_URI"] == "/h"
        assert actual["_sluice_command"] == "true"
