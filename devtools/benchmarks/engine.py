"""The engine compared with plain Slurm commands: submitting many jobs, polling thousands of jobs.

Runs on the embedded cluster with its own database. Its Slurm jobs never start and are cancelled at the end.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import django

from devtools.benchmarks import BenchmarkResult
from devtools.benchmarks.transport import start_benchmark_cluster

if TYPE_CHECKING:
    from accounts.models import User
    from clusters.models import Cluster

USERS = ("alice", "bob", "carol")


def set_up() -> Cluster:
    """Create a new database with the demo users and the embedded cluster; returns the cluster."""
    os.environ.update(start_benchmark_cluster())
    home = Path(os.environ["SLUICE_HOME"])
    for stale_file in home.glob("engine-bench.sqlite3*"):
        stale_file.unlink()
    os.environ["DATABASE_URL"] = f"sqlite:///{home / 'engine-bench.sqlite3'}"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")
    django.setup()
    from django.core.management import call_command

    from accounts.models import User
    from clusters.connections import slurm_client_for
    from clusters.models import Cluster, store_capacity

    call_command("migrate", verbosity=0)
    for name in USERS:
        User.objects.create_user(name)
    call_command("embedded", verbosity=0)
    cluster = Cluster.objects.get()
    store_capacity(cluster, slurm_client_for(cluster).read_capacity())
    return cluster


def measure(*, quick: bool) -> Iterator[BenchmarkResult]:
    cluster = set_up()
    # Jobs must not start: they would use the machine's cores and distort the measurement.
    set_partition_state("down")
    try:
        yield from measure_submission(cluster, 100 if quick else 500)
        yield from measure_polling(cluster, [500] if quick else [5000, 10000])
    finally:
        set_partition_state("up")


def set_partition_state(state: str) -> None:
    subprocess.run(["scontrol", "update", "partitionname=cpu", f"state={state}"], check=True)


# -- submitting ---------------------------------------------------------------------------------------


def measure_submission(cluster: Cluster, count: int) -> Iterator[BenchmarkResult]:
    from accounts.models import User
    from clusters.connections import slurm_commands_for, transport_for
    from clusters.models import EngineLease, Namespace
    from clusters.passes import PassContext
    from clusters.transport.base import FileToWrite
    from engine.lease import Lease
    from jobs.actions import create_job
    from jobs.jobfile import JobSpec
    from jobs.models import Attempt, Job
    from jobs.script.paths import AttemptPaths
    from jobs.sync.attempt_files import load_render_options, render_attempt
    from jobs.sync.submitter import Submitter

    alice: User = User.objects.get(username="alice")
    namespace = Namespace.objects.get(name="cpu")
    for n in range(count):
        spec = JobSpec.model_validate(
            {
                "jobName": f"bench-{n}",
                "image": "busybox",
                "namespace": "cpu",
                "taskRoles": [{"name": "main", "command": "true"}],
            }
        )
        create_job(by=alice, spec=spec, namespace=namespace)
    transport = transport_for(cluster, "sluice-alice")
    root = transport.run(["mktemp", "-d"]).text.strip()
    # Write the scripts that Sluice would render before the measurement, so that the measured loop runs only sbatch.
    options = load_render_options(cluster, "sluice-alice")
    files = []
    for n, job in enumerate(Job.objects.select_related("namespace")):
        paths = AttemptPaths(root, f"j{n}", 1)
        rendered = render_attempt(job, paths, unix_user="sluice-alice", options=options)
        files += [
            FileToWrite(f"jobs/j{n}/1/batch.sh", rendered["batch.sh"].encode()),
            FileToWrite(f"jobs/j{n}/1/logs/.keep", b""),
        ]
    transport.write_files(root, files)
    loop = (
        "for i in $(seq 0 $(($1 - 1))); do d=$2/jobs/j$i/1; "
        'sbatch --parsable --chdir="$d" "$d/batch.sh"; done'
    )
    conf = f"SLURM_CONF={slurm_commands_for(cluster).slurm_conf}"

    started = time.perf_counter()
    sbatch_output = transport.run(
        ["env", conf, "sh", "-c", loop, "sh", str(count), root], timeout_s=600
    )
    baseline = time.perf_counter() - started
    cancel_jobs(cluster, sbatch_output.text.split())

    lease = Lease.acquire(cluster, "bench")
    if lease is None:
        raise RuntimeError("the lease of a fresh database is taken")
    EngineLease.objects.update(expires_at="2100-01-01T00:00:00Z")
    submitter = Submitter(PassContext(cluster, lease))
    started = time.perf_counter()
    submitter.run()
    submitter.wait(600)
    measured = time.perf_counter() - started
    submitter.close()
    done = Attempt.objects.filter(phase="live").count()
    yield BenchmarkResult(
        f"{count} jobs of one person to Slurm", measured, "s", baseline, "sbatch in a loop over one SSH session",
        target_ratio=1.5, note=f"{done} have their id; files, rows and events included",
    )  # fmt: skip
    cancel_jobs(cluster, list(Attempt.objects.values_list("slurm_job_id", flat=True)))
    EngineLease.objects.all().delete()
    Attempt.objects.all().delete()
    Job.objects.all().delete()


def cancel_jobs(cluster: Cluster, ids: list[str]) -> None:
    from clusters.connections import slurm_client_for

    for start in range(0, len(ids), 500):
        slurm_client_for(cluster).cancel(ids[start : start + 500])


# -- polling ------------------------------------------------------------------------------------------


def measure_polling(cluster: Cluster, sizes: list[int]) -> Iterator[BenchmarkResult]:
    from clusters.connections import slurm_client_for, slurm_commands_for, transport_for
    from clusters.models import EngineLease
    from clusters.passes import PassContext
    from clusters.slurm import sacct, squeue
    from clusters.slurm.fields import new_separator
    from engine.lease import Lease
    from jobs.models import Attempt
    from jobs.sync.poller import Poller
    from jobs.sync.task_reader import TaskReader

    alice = transport_for(cluster, "sluice-alice")
    root = alice.run(["mktemp", "-d"]).text.strip()
    script = (
        b"#!/bin/bash\n#SBATCH --hold\n#SBATCH --partition=cpu\n#SBATCH --output=/dev/null\ntrue\n"
    )
    alice.run(["sh", "-c", 'cat >"$1"', "sh", f"{root}/batch.sh"], stdin=script)
    lease = Lease.acquire(cluster, "bench")
    if lease is None:
        raise RuntimeError("the lease of a fresh database is taken")
    EngineLease.objects.update(expires_at="2100-01-01T00:00:00Z")
    slurm = slurm_client_for(cluster)
    total = 0
    # Ids of jobs that squeue does not list, so that each poll runs sacct for them.
    missing_ids = [str(900_000_000 + n) for n in range(20)]
    all_ids: list[str] = []
    try:
        for size in sizes:
            loop = (
                'for i in $(seq "$1" "$2"); do mkdir -p "$3/$i" && '
                'sbatch --parsable --chdir="$3/$i" "$3/batch.sh"; done'
            )
            conf = f"SLURM_CONF={slurm_commands_for(cluster).slurm_conf}"
            argv = ["env", conf, "sh", "-c", loop, "sh", str(total + 1), str(size), root]
            ids = alice.run(argv, timeout_s=1800).text.split()
            rows = [(slurm_id, f"{root}/{total + 1 + n}") for n, slurm_id in enumerate(ids)]
            if total == 0:
                rows += [(slurm_id, f"/nowhere/{slurm_id}") for slurm_id in missing_ids]
            create_live_rows(cluster, rows)
            all_ids += ids
            total = size
            context = PassContext(cluster, lease)
            stats = context.stats
            poller = Poller(context, TaskReader(context))
            poller.run()  # not measured: the first poll saves every row
            measured, baseline = [], []
            for _ in range(5):
                before = dict(stats.commands)
                started = time.perf_counter()
                poller.run()
                measured.append(time.perf_counter() - started)
                commands_run = {k: v - before.get(k, 0) for k, v in stats.commands.items()}
                started = time.perf_counter()
                separator = new_separator()
                slurm.transport.run(squeue.build_squeue_argv(slurm.commands, separator=separator))
                slurm.transport.run(
                    sacct.build_sacct_argv(slurm.commands, separator=separator, job_ids=missing_ids)
                )
                baseline.append(time.perf_counter() - started)
            live = Attempt.objects.filter(phase="live").count()
            yield BenchmarkResult(
                f"a poll of {live:,} live jobs", statistics.median(measured) * 1000, "ms",
                statistics.median(baseline) * 1000, "bare squeue and sacct", target_ratio=2.0,
                note=", ".join(f"{v} {k}" for k, v in sorted(commands_run.items())),
            )  # fmt: skip
    finally:
        cancel_jobs(cluster, all_ids)
        alice.run(["rm", "-rf", root], timeout_s=120)


def create_live_rows(cluster: Cluster, rows: list[tuple[str, str]]) -> None:
    """Create a pending job with a live attempt for each pair of Slurm job id and work directory."""
    from accounts.models import User
    from clusters.models import Namespace
    from jobs.models import Attempt, Job

    owner = User.objects.get(username="alice")
    namespace = Namespace.objects.get(name="cpu")
    jobs = [
        Job(
            id=uuid.uuid4(), owner=owner, namespace=namespace, cluster=cluster,
            name=f"live-{slurm_id}", state="PENDING", attempt_number=1,
        )
        for slurm_id, _ in rows
    ]  # fmt: skip
    Job.objects.bulk_create(jobs, batch_size=500)
    Attempt.objects.bulk_create(
        [
            Attempt(
                job=job, cluster=cluster, number=1, phase="live", unix_user="sluice-alice",
                work_dir=work_dir, slurm_job_id=slurm_id,
            )
            for job, (slurm_id, work_dir) in zip(jobs, rows, strict=True)
        ],
        batch_size=500,
    )  # fmt: skip
