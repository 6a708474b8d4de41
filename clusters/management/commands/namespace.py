"""`manage.py namespace sync CLUSTER`: proposes namespaces for partitions and reports what drifted apart."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from clusters import drift
from clusters.errors import ClusterError
from clusters.forms import format_time
from clusters.management.commands.cluster import find_cluster


class Command(BaseCommand):
    help = (
        "Look after namespaces. “sync CLUSTER” compares them with Slurm: exit code 1 when something "
        "drifted apart."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        sync = verbs.add_parser("sync", help="propose a namespace per partition and report drift")
        sync.add_argument("cluster", help="the cluster's short name")
        sync.add_argument("--apply", action="store_true", help="make the proposed namespaces")

    def handle(self, *args: Any, **options: Any) -> None:
        cluster = find_cluster(options["cluster"])
        try:
            survey = drift.survey(cluster)
        except ClusterError as error:
            raise CommandError(
                f"{error.user_message} (“manage.py cluster check {cluster.name}” finds out where it breaks.)"
            ) from error
        with transaction.atomic():
            if options["apply"]:
                drift.apply(cluster, survey.proposals)
        verb = "Made" if options["apply"] else "Proposed"
        for proposal in survey.proposals:
            limit = format_time(proposal.max_time_s) if proposal.max_time_s else "no limit"
            self.stdout.write(
                f"{verb}: namespace {proposal.name} on partition {proposal.partition}, longest time {limit}"
            )
        if survey.proposals and not options["apply"]:
            self.stdout.write("(--apply makes them, without members.)")
        for found in survey.drifts:
            self.stdout.write(
                f"{self.style.WARNING('Drift')}: namespace {found.namespace}: {found.problem}\n       → {found.remedy}"
            )
        if not survey.drifts:
            self.stdout.write(self.style.SUCCESS("Every namespace fits what Slurm has."))
            return
        raise SystemExit(1)
