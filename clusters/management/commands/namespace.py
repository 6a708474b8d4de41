"""`manage.py namespace sync CLUSTER`: proposes namespaces for partitions and reports drift."""

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
        "Compare namespaces with Slurm: “sync CLUSTER” proposes namespaces and reports drift "
        "(exit code 1 if there is any)."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        subparsers = parser.add_subparsers(dest="verb", required=True)
        sync = subparsers.add_parser(
            "sync", help="propose a namespace per partition and report drift"
        )
        sync.add_argument("cluster", help="the cluster's short name")
        sync.add_argument("--apply", action="store_true", help="create the proposed namespaces")

    def handle(self, *args: Any, **options: Any) -> None:
        with translation.override(console_language()):
            self._sync(options)

    def _sync(self, options: dict[str, Any]) -> None:
        cluster = find_cluster(options["cluster"])
        try:
            slurm = slurm_comparison.read_slurm(cluster)
        except ClusterError as error:
            raise CommandError(
                _("%(message)s Run “manage.py cluster check %(name)s” to find the cause.")
                % {"message": translate(error.user_message), "name": cluster.name}
            ) from error
        slurm_comparison.store_slurm_names(cluster, slurm)
        proposals, drifts = slurm_comparison.compare_with_slurm(cluster, slurm)
        if options["apply"]:
            with transaction.atomic():
                slurm_comparison.create_namespaces(cluster, proposals)
        template = _(
            "Proposed: namespace %(name)s on partition %(partition)s, longest time %(limit)s"
        )
        if options["apply"]:
            template = _(
                "Created: namespace %(name)s on partition %(partition)s, longest time %(limit)s"
            )
        for proposal in proposals:
            limit = format_time_limit(proposal.max_time_s) if proposal.max_time_s else _("no limit")
            self.stdout.write(
                template % {"name": proposal.name, "partition": proposal.partition, "limit": limit}
            )
        if proposals and not options["apply"]:
            self.stdout.write(_("Use --apply to create them, without members."))
        drift_label = self.style.WARNING(_("Drift"))
        for drift in drifts:
            where = _("namespace %(name)s") % {"name": drift.namespace}
            self.stdout.write(f"{drift_label}: {where}: {translate(drift.problem)}")
            self.stdout.write(f"       → {translate(drift.remedy)}")
        if not drifts:
            self.stdout.write(self.style.SUCCESS(_("All namespaces agree with Slurm.")))
            return
        raise SystemExit(1)
