"""`manage.py render FILE`: prints the plan and the scripts of a job file. Submits nothing."""

from __future__ import annotations

import getpass
import sys
from argparse import ArgumentParser
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError

from clusters.capacity import Capacity, GpuCount, NamespaceRules, Node, Partition
from clusters.models import Namespace, ResourceSpec, load_capacity
from jobs.jobfile import JobSpec, SpecError
from jobs.jobfile.importers import load_text
from jobs.plan import Plan, PlanError, describe_plan, plan
from jobs.script.paths import AttemptPaths
from jobs.script.render import RUNTIMES, RenderError, RenderOptions, render_files
from jobs.store.cluster_render_options import build_render_options

EXAMPLE_NODE_COUNT = 64


class Command(BaseCommand):
    help = "Print the plan and the batch script of a job file in any known format."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", help="job file; - reads standard input")
        parser.add_argument("--namespace", default="", help="namespace, if not the one in the file")
        parser.add_argument(
            "--runtime", choices=RUNTIMES, help="container runtime, if not the cluster's"
        )
        parser.add_argument(
            "--user", default="", help="Unix user of the job; default: the current user"
        )
        parser.add_argument("--all", action="store_true", help="print every file of the attempt")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            loaded = load_text(_read_job_file(options["file"]), filename=options["file"])
            for warning in loaded.warnings:
                self.stderr.write(f"warning: {warning}")
            self._print_scripts(loaded.spec, options)
        except (SpecError, PlanError, RenderError) as error:
            raise CommandError(str(error)) from error

    def _print_scripts(self, spec: JobSpec, options: dict[str, Any]) -> None:
        user = options["user"] or getpass.getuser()
        namespace = _find_namespace(options["namespace"] or spec.namespace)
        if namespace is None and options["namespace"]:
            raise CommandError(f"There is no namespace {options['namespace']}.")
        capacity = load_capacity(namespace.cluster) if namespace else None
        if namespace is None or capacity is None:
            self.stderr.write(
                "note: planned on an example cluster: the namespace or its cluster is unknown."
            )
        rules = namespace.rules() if namespace and capacity else EXAMPLE_RULES
        sizes = ResourceSpec.list_priced(namespace) if namespace and capacity else []
        job_plan = plan(spec, rules, capacity or _build_example_capacity(spec), sizes)
        render_options = build_render_options(namespace.cluster) if namespace else RenderOptions()
        if options["runtime"]:
            render_options = replace(render_options, runtime=options["runtime"])
        home = f"/home/{user}"
        root = namespace.cluster.work_root_for(user, home) if namespace else f"{home}/sluice"
        rendered = render_files(
            job_plan,
            spec,
            AttemptPaths(root, "example", 1),
            user=user,
            options=render_options,
            default_image=rules.default_image,
        )
        self.stdout.write(_format_plan(job_plan))
        files = rendered if options["all"] else {"batch.sh": rendered["batch.sh"]}
        for path, text in files.items():
            self.stdout.write(f"\n======== {path}\n{text}")


def _read_job_file(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}.") from error


def _find_namespace(name: str) -> Namespace | None:
    try:
        return Namespace.objects.select_related("cluster").filter(name=name).first()
    except DatabaseError:  # the database has no tables yet: plan on an example cluster
        return None


def _format_plan(job_plan: Plan) -> str:
    totals = job_plan.totals
    gpus = ", ".join(f"{count}×{kind or 'GPU'}" for kind, count in totals.gpus.items()) or "none"
    hours = (
        "partition limit"
        if totals.node_hours is None
        else f"{totals.node_hours:g} node hours, {totals.gpu_hours:g} GPU hours"
    )
    if totals.machine_hours is not None:
        hours += f", cost {totals.machine_hours:g} machine hours"
    lines = [
        f"layout: {job_plan.layout}",
        f"plan: {'; '.join(describe_plan(job_plan))}",
        f"total: {totals.tasks} tasks, {totals.nodes} nodes, {totals.cpus} CPUs, {totals.mem_mib} MB, GPUs {gpus}",
        f"at most: {hours}",
        *(f"note: {note.message}" for note in job_plan.notes),
    ]
    return "\n".join(lines)


EXAMPLE_RULES = NamespaceRules("example", ("example",), default_time_s=86400)


def _build_example_capacity(spec: JobSpec) -> Capacity:
    """Build the capacity of a cluster of large equal nodes, each with eight GPUs of every type in the job file."""
    gpu_types = sorted(
        {spec.gpu_type_of(role).lower() for role in spec.task_roles if role.gpu_number}
    )
    names = tuple(f"node{number:02}" for number in range(1, EXAMPLE_NODE_COUNT + 1))
    gpus = tuple(GpuCount(gpu_type, 8, 0) for gpu_type in gpu_types)
    nodes = tuple(Node(name, "idle", True, 128, 0, 1024**2, 0, gpus=gpus) for name in names)
    partition = Partition("example", True, True, names, None, None)
    return Capacity(datetime.now(UTC), nodes, (partition,))
