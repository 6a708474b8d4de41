"""`manage.py cluster check NAME`: prints what the doctor finds, a line a link."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import translation
from django.utils.translation import gettext

from clusters import doctor
from clusters.doctor import Line, Outcome
from clusters.errors import IdentityRefused
from clusters.models import Cluster
from core.translation import console_language, told


class Command(BaseCommand):
    help = "Look after clusters. “check NAME” tests every link and says what to do."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True)
        check = verbs.add_parser("check", help="test every link between Sluice and a cluster")
        check.add_argument("name", help="the cluster's short name")
        check.add_argument(
            "--user",
            default="",
            help="a person of Sluice, or a Unix user, to log in as (default: a member of a namespace)",
        )
        check.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        with translation.override(console_language()):
            self._check(options)

    def _check(self, options: dict[str, Any]) -> None:
        cluster = find_cluster(options["name"])
        try:
            unix_user, namespaces = doctor.whom_to_try(cluster, options["user"])
        except IdentityRefused as refused:
            raise CommandError(told(refused.user_message)) from refused
        lines = []
        for line in doctor.examine_cluster(cluster, unix_user=unix_user, namespaces=namespaces):
            lines.append(line)
            if not options["json"]:
                self._print(line)
        if options["json"]:
            self.stdout.write(
                json.dumps(
                    {"ok": doctor.all_ok(lines), "lines": [asdict(line) for line in lines]},
                    indent=1,
                )
            )
        if not doctor.all_ok(lines):
            raise SystemExit(1)

    def _print(self, line: Line) -> None:
        paint = {
            Outcome.OK: self.style.SUCCESS,
            Outcome.WARN: self.style.WARNING,
            Outcome.FAIL: self.style.ERROR,
            Outcome.NOT_TRIED: self.style.NOTICE,
        }[line.outcome]
        label = f"{line.outcome.upper():9}"
        self.stdout.write(f"{paint(label)}  {told(line.title)}: {told(line.found)}")
        if line.remedy:
            self.stdout.write(f"{'':9}  → {told(line.remedy)}")


def find_cluster(name: str) -> Cluster:
    cluster = Cluster.objects.filter(name=name).first()
    if cluster is None:
        known = ", ".join(Cluster.objects.values_list("name", flat=True)) or gettext("none yet")
        raise CommandError(
            gettext("There is no cluster “%(name)s”. There are: %(known)s.")
            % {"name": name, "known": known}
        )
    return cluster
