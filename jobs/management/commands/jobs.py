"""`manage.py jobs reconcile`: compares every live job with Slurm and prints the differences. Changes nothing."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from clusters.errors import ClusterError
from clusters.models import Cluster
from jobs.models import Attempt
from jobs.sync.reconcile import find_differences


class Command(BaseCommand):
    help = "Compare jobs with Slurm. `reconcile` prints the differences; the engine corrects them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("action", choices=["reconcile"])
        parser.add_argument("--cluster", default="", help="compare only this cluster")

    def handle(self, *args: Any, **options: Any) -> None:
        clusters = Cluster.objects.filter(enabled=True)
        if options["cluster"]:
            clusters = clusters.filter(name=options["cluster"])
            if not clusters:
                raise CommandError(f"There is no enabled cluster {options['cluster']}.")
        difference_count = 0
        for cluster in clusters:
            try:
                differences = find_differences(cluster)
            except ClusterError as error:
                raise CommandError(f"{cluster.name}: {error.user_message}") from error
            live_count = Attempt.objects.filter(cluster=cluster, phase=Attempt.Phase.LIVE).count()
            for difference in differences:
                self.stdout.write(
                    f"{difference.cluster}  {difference.slurm_job_id or '-'}  {difference.job}: {difference.description}"
                )
            self.stdout.write(
                f"{cluster.name}: {live_count} live jobs, {len(differences)} differences"
            )
            difference_count += len(differences)
        if difference_count:
            raise CommandError(f"{difference_count} differences.")
