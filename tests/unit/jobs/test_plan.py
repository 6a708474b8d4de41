"""The planner: layouts, rejected jobs, namespace and partition limits, and the start check."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from clusters.capacity import Capacity, GpuCount, NamespaceRules, Node, Partition
from jobs.jobfile import JobSpec, Problem
from jobs.plan import Plan, PlanError, describe_plan, find_start_obstacles, plan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = 3600


def node(name: str, cpus: int = 8, mem_mib: int = 16000, gpus: str = "", **more: Any) -> Node:
    counts = []
    for part in filter(None, gpus.split(",")):
        kind, total, used = [*part.split(":"), "0"][:3]
        counts.append(GpuCount(kind, int(total), int(used)))
    values = {"state": "idle", "usable": True, "cpus_used": 0, "mem_mib_used": 0, **more}
    return Node(name=name, cpus=cpus, mem_mib=mem_mib, gpus=tuple(counts), **values)


def cluster(*nodes: Node, **partitions: str | Partition) -> Capacity:
    made = [
        value
        if isinstance(value, Partition)
        else Partition(name, True, False, tuple(value.split(",")), 24 * HOUR, None)
        for name, value in partitions.items()
    ]
    return Capacity(NOW, nodes, tuple(made))


CAPACITY = cluster(
    node("c1"),
    node("c2"),
    node("g1", cpus=16, mem_mib=64000, gpus="a100:4"),
    node("g2", cpus=16, mem_mib=64000, gpus="a100:4"),
    node("t1", gpus="t4:2"),
    cpu="c1,c2",
    gpu="g1,g2",
    old="t1",
)
RULES = NamespaceRules("lab", ("cpu", "gpu", "old"), account="lab")


def job(*roles: dict[str, Any], **more: Any) -> JobSpec:
    named = [
        {"name": f"r{i}", "command": "true", "memoryMB": 1000, **role}
        for i, role in enumerate(roles)
    ]
    return JobSpec.model_validate({"jobName": "j", "image": "x", "taskRoles": named, **more})


PS = {"name": "ps", "memoryMB": 2048}
WORKER = {"name": "worker", "taskNumber": 2, "cpuNumber": 4, "memoryMB": 16384, "gpuNumber": 1}


def problem_codes(
    spec: JobSpec, rules: NamespaceRules = RULES, capacity: Capacity = CAPACITY
) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan(spec, rules, capacity)
    assert all(p.message.endswith(".") and p.suggestion for p in caught.value.problems)
    return [p.code for p in caught.value.problems]


@pytest.mark.parametrize(
    ("spec", "layout", "expected_text"),
    [
        (job({}), "simple", "1 node of cpu: 1 × r0 (1 CPU, 1000 MB)"),
        (
            job(PS, {**WORKER, "gpuType": "a100"}),
            "packed",
            "1 node of gpu: 1 × ps (1 CPU, 2 GB), 2 × worker (4 CPU, 16 GB, 1 × a100 each)",
        ),
        (
            job(PS, WORKER, placement="separate"),
            "het",
            "1 node of cpu: 1 × ps (1 CPU, 2 GB); at least 1 node of gpu: 2 × worker (4 CPU, 16 GB, 1 GPU each)",
        ),
        (
            job({**PS, "gpuNumber": 1, "gpuType": "t4"}, {**WORKER, "gpuType": "a100"}),
            "het",
            "1 node of old: 1 × ps (1 CPU, 2 GB, 1 × t4); at least 1 node of gpu: 2 × worker (4 CPU, 16 GB, 1 × a100 each)",
        ),
        # 7 GPUs on nodes with 4: packed nodes are equal and would request 8, separate roles request 7.
        (
            job({}, {**WORKER, "taskNumber": 7, "cpuNumber": 1, "memoryMB": 100}),
            "het",
            "1 node of cpu: 1 × r0 (1 CPU, 1000 MB); at least 2 nodes of gpu: 7 × worker (1 CPU, 100 MB, 1 GPU each)",
        ),
        # A fixed port allows one task per node.
        (
            job({"taskNumber": 2, "portList": [{"label": "p", "beginAt": 8080}]}),
            "simple",
            "2 nodes of cpu: 2 × r0 (1 CPU, 1000 MB each)",
        ),
        # Roles with overlapping fixed ports cannot share a node.
        (
            job(
                *[
                    {"portList": [{"label": "p", "beginAt": 80 + i, "portNumber": 2}]}
                    for i in (0, 1)
                ]
            ),
            "het",
            "1 node of cpu: 1 × r0 (1 CPU, 1000 MB); 1 node of cpu: 1 × r1 (1 CPU, 1000 MB)",
        ),
        (
            job({"taskNumber": 8}, {"taskNumber": 8}),
            "packed",
            "2 nodes of cpu: 8 × r0 (1 CPU, 1000 MB each), 8 × r1 (1 CPU, 1000 MB each)",
        ),
        (
            job({"taskNumber": 2, "placement": "separate"}),
            "simple",
            "2 nodes of cpu: 2 × r0 (1 CPU, 1000 MB each)",
        ),
    ],
)
def test_layout_fits_the_roles_and_is_described(
    spec: JobSpec, layout: str, expected_text: str
) -> None:
    job_plan = plan(spec, RULES, CAPACITY)
    assert (job_plan.layout, "; ".join(describe_plan(job_plan))) == (layout, expected_text)
    assert Plan.from_json(json.loads(json.dumps(job_plan.to_json()))) == job_plan


MPI = {"framework": {"name": "mpi", "strategy": "srun"}}
CHIEF = {"name": "chief"}
WORKERS = {"name": "worker", "taskNumber": 3}


@pytest.mark.parametrize(
    ("spec", "layout", "expected_text", "steps"),
    [
        # Equal tasks share one step and one request; Slurm chooses the nodes.
        (
            job(WORKERS, CHIEF, **MPI),
            "simple",
            "at least 1 node of cpu: 3 × worker (1 CPU, 1000 MB each), 1 × chief (1 CPU, 1000 MB)",
            [["chief", "worker"]],
        ),
        # More tasks than one node holds.
        (
            job({**WORKERS, "taskNumber": 15}, CHIEF, placement="pack", **MPI),
            "simple",
            "2 nodes of cpu: 15 × worker (1 CPU, 1000 MB each), 1 × chief (1 CPU, 1000 MB)",
            [["chief", "worker"]],
        ),
        # Different tasks are components of a het job, the chief first.
        (
            job({**WORKERS, "cpuNumber": 2}, CHIEF, **MPI),
            "het",
            "1 node of cpu: 1 × chief (1 CPU, 1000 MB); at least 1 node of cpu: 3 × worker (2 CPU, 1000 MB each)",
            [["chief", "worker"]],
        ),
        (
            job(CHIEF, WORKERS, placement="separate", **MPI),
            "het",
            "1 node of cpu: 1 × chief (1 CPU, 1000 MB); at least 1 node of cpu: 3 × worker (1 CPU, 1000 MB each)",
            [["chief", "worker"]],
        ),
        # A role outside the MPI program has its own step.
        (
            job({"name": "monitor", "cpuNumber": 2}, CHIEF, WORKERS, **MPI),
            "packed",
            "1 node of cpu: 1 × monitor (2 CPU, 1000 MB), 1 × chief (1 CPU, 1000 MB), 3 × worker (1 CPU, 1000 MB each)",
            [["monitor"], ["chief", "worker"]],
        ),
        # A fixed port of both roles allows one task per node, also of both roles together.
        (
            job(
                *[
                    {**r, "portList": [{"label": "p", "beginAt": 80}]}
                    for r in (CHIEF, {"name": "worker"})
                ],
                **MPI,
            ),
            "simple",
            "2 nodes of cpu: 1 × chief (1 CPU, 1000 MB), 1 × worker (1 CPU, 1000 MB)",
            [["chief", "worker"]],
        ),
        # mpirun starts the processes itself.
        (
            job(CHIEF, WORKERS, framework={"name": "mpi", "strategy": "hostfile"}),
            "packed",
            "1 node of cpu: 1 × chief (1 CPU, 1000 MB), 3 × worker (1 CPU, 1000 MB each)",
            [["chief"], ["worker"]],
        ),
    ],
)
def test_roles_of_one_mpi_program_share_a_step(
    spec: JobSpec, layout: str, expected_text: str, steps: list[list[str]]
) -> None:
    job_plan = plan(spec, RULES, CAPACITY)
    assert (job_plan.layout, "; ".join(describe_plan(job_plan))) == (layout, expected_text)
    assert [[role.name for role in roles] for roles in job_plan.list_steps()] == steps
    assert job_plan.totals.cpus == sum(role.cpus * role.tasks for role in job_plan.roles)
    assert [role.name for role in job_plan.roles] == [role.name for role in spec.task_roles]
    assert not find_start_obstacles(job_plan, CAPACITY)
    assert Plan.from_json(json.loads(json.dumps(job_plan.to_json()))) == job_plan


def test_plan_of_an_earlier_version_has_one_step_per_role() -> None:
    stored = plan(job(PS, WORKER), RULES, CAPACITY).to_json()
    del stored["mpi_roles"]
    assert [len(roles) for roles in Plan.from_json(stored).list_steps()] == [1, 1]


def test_mpi_roles_with_different_tasks_are_refused_where_they_cannot_be_components() -> None:
    unequal = (CHIEF, {**WORKERS, "cpuNumber": 2})
    one_node = replace(RULES, partitions=("old",))
    assert problem_codes(job(*unequal, **MPI), one_node) == ["mpi_roles"]
    assert problem_codes(job(*unequal, placement="pack", **MPI)) == ["mpi_roles"]
    with pytest.raises(PlanError, match=r"different resources.*need separate nodes.*\(1 node\)"):
        plan(job(*unequal, **MPI), one_node, CAPACITY)
    # Equal tasks fit on the same node.
    assert plan(job(CHIEF, WORKERS, **MPI), one_node, CAPACITY).layout == "simple"
    # Separate nodes were requested, and there is one.
    assert problem_codes(job(CHIEF, WORKERS, placement="separate", **MPI), one_node) == [
        "too_few_nodes"
    ]


def test_packed_nodes_are_equal_and_totals_match_the_request() -> None:
    spec = job(
        PS, {**WORKER, "taskNumber": 8, "gpuType": "A100", "cpuNumber": 3, "memoryMB": 10000}
    )
    job_plan = plan(replace_limit(spec, "2h"), replace(RULES, partitions=("gpu",)), CAPACITY)
    (group,) = job_plan.groups
    assert (job_plan.layout, group.nodes, group.cpus, group.gpus) == ("packed", 2, 13, 8 // 2)
    assert [role.per_node for role in job_plan.roles] == [1, 4]
    assert group.mem_mib == 2048 + 4 * 10002  # rounded up to whole MiB per CPU, 3 CPUs
    assert job_plan.totals.gpus == {"a100": 8}
    assert (job_plan.totals.nodes, job_plan.totals.node_hours) == (2, 4.0)


def replace_limit(spec: JobSpec, limit: str) -> JobSpec:
    return JobSpec.model_validate({**spec.model_dump(by_alias=True), "timeLimit": limit})


@pytest.mark.parametrize(
    ("spec", "codes"),
    [
        (job({"cpuNumber": 17, "memoryMB": 70000}), ["task_too_large", "task_too_large"]),
        (job({"gpuNumber": 5}), ["task_too_large"]),
        (job({"gpuNumber": 1, "gpuType": "h100"}), ["gpu_type"]),
        (job({"cpuNumber": 9, "gpuNumber": 1, "gpuType": "t4"}), ["task_too_large"]),
        (job({"taskNumber": 9, "gpuNumber": 1}), ["too_many_tasks"]),
        (job({"cpuNumber": 99}, {"gpuNumber": 99}), ["task_too_large", "task_too_large"]),
        (job({"taskNumber": 3, "portList": [{"label": "p", "beginAt": 80}]}), ["too_many_tasks"]),
        (job({"placement": "separate", "taskNumber": 3}), ["too_many_tasks"]),
        (job({"gpuNumber": 4, "taskNumber": 2}, {"gpuNumber": 4}), ["too_large_together"]),
        (job({}, {}, {}, {}, {}, {}, placement="separate"), ["too_few_nodes"]),
        (
            job(
                {"gpuNumber": 1, "gpuType": "a100"},
                {"gpuNumber": 1, "gpuType": "t4"},
                placement="pack",
            ),
            ["cannot_pack"],
        ),
        (job({}, timeLimit="25h"), ["time_limit"]),
    ],
)
def test_jobs_that_can_never_start_are_rejected(spec: JobSpec, codes: list[str]) -> None:
    assert problem_codes(spec) == codes


def test_roles_with_the_same_fixed_port_do_not_fit_one_node() -> None:
    one = cluster(node("n1"), only="n1")
    roles = [{"portList": [{"label": "p", "beginAt": 8080}]} for _ in range(2)]
    assert problem_codes(job(*roles), NamespaceRules("x", ("only",)), one) == ["port_conflict"]


def test_separate_roles_on_one_node_suggest_another_placement() -> None:
    one = cluster(node("n1"), small="n1")
    with pytest.raises(
        PlanError,
        match=r"2 roles on separate nodes do not fit: small has 1 node. Use placement pack.",
    ):
        plan(job({}, {}, placement="separate"), NamespaceRules("x", ("small",)), one)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_gpus_per_job": 1}, "namespace_gpus"),
        ({"max_cpus_per_job": 8}, "namespace_cpus"),
        ({"max_mem_mib_per_job": 20000}, "namespace_mem"),
        ({"max_time_s": HOUR}, "time_limit"),
    ],
)
def test_jobs_above_a_namespace_limit_are_rejected(limits: dict[str, int], code: str) -> None:
    assert problem_codes(job(PS, WORKER, timeLimit="2h"), replace(RULES, **limits)) == [code]


def test_namespace_node_limit_packs_roles() -> None:
    spec = job({"taskNumber": 8}, {"taskNumber": 8})
    limited = replace(RULES, max_nodes_per_job=1)
    assert describe_plan(plan(spec, limited, CAPACITY))[0].startswith("1 node of gpu: ")


def test_unsuitable_partitions_are_skipped() -> None:
    short = Partition("cpu", True, False, ("c1",), HOUR, None)
    closed = Partition("vip", True, False, ("c2",), None, None, allowed_accounts=("boss",))
    open_ = Partition("slow", True, False, ("c2",), None, None)
    capacity = Capacity(NOW, CAPACITY.nodes, (short, closed, open_))
    rules = NamespaceRules("x", ("gone", "vip", "cpu", "slow"), account="lab")
    assert plan(job({}, timeLimit="2h"), rules, capacity).groups[0].partition == "slow"
    assert plan(job({}), rules, capacity).groups[0].partition == "cpu"
    assert problem_codes(job({}), replace(rules, partitions=("gone", "vip")), capacity) == [
        "no_partition"
    ]


def test_constraint_requires_node_features() -> None:
    capacity = cluster(node("a"), node("b", cpus=4, features=("ib",)), p="a,b")
    rules = NamespaceRules("x", ("p",), constraint="ib")
    assert plan(job({"cpuNumber": 4}), rules, capacity).constraint == "ib"
    assert problem_codes(job({"cpuNumber": 5}), rules, capacity) == ["task_too_large"]


def test_default_time_limit_is_capped_by_the_partition() -> None:
    rules = replace(RULES, default_time_s=48 * HOUR)
    assert plan(job({}), rules, CAPACITY).time_limit_s == 24 * HOUR
    assert plan(job({}), RULES, CAPACITY).time_limit_s is None


def test_down_nodes_add_a_note_but_do_not_reject() -> None:
    down = cluster(node("c1", usable=False, state="down"), cpu="c1")
    job_plan = plan(job({}), replace(RULES, partitions=("cpu",)), down)
    assert [note.code for note in job_plan.notes] == ["nodes_down"]
    assert find_start_obstacles(job_plan, down)


@pytest.mark.parametrize(
    ("spec", "busy", "codes"),
    [
        (job({}), {}, []),
        (job({"cpuNumber": 4}), {"cpus_used": 6}, ["free_in_pieces"]),
        (job({"cpuNumber": 4, "taskNumber": 2}), {"cpus_used": 6}, ["free_cpus"]),
        (job({"memoryMB": 2000}), {"mem_mib_used": 15000}, ["free_in_pieces"]),
        (job({"cpuNumber": 2}, {"cpuNumber": 2}), {"cpus_used": 5}, ["free_in_pieces"]),
        (job({"cpuNumber": 2}, {"cpuNumber": 2}, placement="separate"), {"cpus_used": 5}, []),
    ],
)
def test_obstacles_to_an_immediate_start_are_listed(
    spec: JobSpec, busy: dict[str, int], codes: list[str]
) -> None:
    rules = NamespaceRules("x", ("cpu",))
    job_plan = plan(spec, rules, cluster(node("c1"), node("c2"), cpu="c1,c2"))
    capacity = cluster(node("c1", **busy), node("c2", **busy), cpu="c1,c2")
    assert [note.code for note in find_start_obstacles(job_plan, capacity)] == codes


def test_busy_gpus_are_reported() -> None:
    job_plan = plan(job({"gpuNumber": 2, "gpuType": "a100"}), RULES, CAPACITY)
    busy = cluster(node("g1", gpus="a100:4:3"), gpu="g1")
    (obstacle,) = find_start_obstacles(job_plan, busy)
    assert obstacle.message == "gpu has 1 GPUs of type a100 free; the job needs 2."


def test_role_without_image_is_refused_unless_the_namespace_has_a_default() -> None:
    spec = job({"name": "ps"}, {"name": "worker", "image": "x"}, image="")
    with pytest.raises(PlanError) as caught:
        plan(spec, RULES, CAPACITY)
    (problem,) = caught.value.problems
    assert (problem.path, problem.code) == ("taskRoles[0].image", "no_image")
    assert "Role ps" in problem.message
    for rules in (replace(RULES, default_image="busybox"), replace(RULES, needs_image=False)):
        assert len(plan(spec, rules, CAPACITY).roles) == 2


def test_known_problems_are_reported_with_the_others() -> None:
    known = [Problem("dataDir", "x.", code="path_uri", suggestion="y.")]
    with pytest.raises(PlanError) as caught:
        plan(job({"cpuNumber": 999}), RULES, CAPACITY, known=known)
    path_problem, _ = caught.value.problems
    assert path_problem.code == "path_uri"
