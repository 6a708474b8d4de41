"""`manage.py namespace sync CLUSTER`: proposes namespaces for partitions and reports what drifted apart."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.utils import translation
from django.utils.translation import gettext as _

from clusters import slurm_comparison
from clusters.errors import ClusterError
from clusters.forms import format_time_limit
from clusters.management.commands.cluster import find_cluster
from core.translation import console_language, translate


class Command(BaseCommand):
    help = (
        "Look after namespaces. “sync CLUSTER” compares them with Slurm: exit code 1 when something "
        "drifted apart."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        subparsers = parser.add_subparsers(dest="verb", required=True)
        sync = subparsers.add_parser(
            "sync", help="propose a namespace per partition and report drift"
        )
        sync.add_argument("cluster", help="the cluster's short name")
        sync.add_argument("--apply", action="store_true", help="make the proposed namespaces")

    def handle(self, *args: Any, **options: Any) -> None:
        with translation.override(console_language()):
            self._sync(options)

    def _sync(self, options: dict[str, Any]) -> None:
        cluster = find_cluster(options["cluster"])
        try:
            survey = slurm_comparison.compare_with_slurm(cluster)
        except ClusterError as error:
            raise CommandError(
                _("%(message)s (“manage.py cluster check %(name)s” finds out where it breaks.)")
                % {"message": translate(error.user_message), "name": cluster.name}
            ) from error
        with transaction.atomic():
            if options["apply"]:
                slurm_comparison.create_namespaces(cluster, survey.proposals)
        template = _(
            "Proposed: namespace %(name)s on partition %(partition)s, longest time %(limit)s"
        )
        if options["apply"]:
            template = _(
                "Made: namespace %(name)s on partition %(partition)s, longest time %(limit)s"
            )
        for proposal in survey.proposals:
            limit = format_time_limit(proposal.max_time_s) if proposal.max_time_s else _("no limit")
            self.stdout.write(
                template % {"name": proposal.name, "partition": proposal.partition, "limit": limit}
            )
        if survey.proposals and not options["apply"]:
            self.stdout.write(_("(--apply makes them, without members.)"))
        drift_label = self.style.WARNING(_("Drift"))
        for found in survey.drifts:
            where = _("namespace %(name)s") % {"name": found.namespace}
            self.stdout.write(f"{drift_label}: {where}: {translate(found.problem)}")
            self.stdout.write(f"       → {translate(found.remedy)}")
        if not survey.drifts:
            self.stdout.write(self.style.SUCCESS(_("Every namespace fits what Slurm has.")))
            return
        raise SystemExit(1)
