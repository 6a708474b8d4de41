"""`manage.py cluster check NAME`: runs the doctor's checks and prints one line per check."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import translation
from django.utils.translation import gettext

from clusters import doctor
from clusters.doctor import CheckOutcome, CheckResult
from clusters.errors import IdentityRefused
from clusters.models import Cluster
from core.translation import console_language, translate


class Command(BaseCommand):
    help = "Diagnose clusters: “check NAME” runs every check and prints what to do about failures."

    def add_arguments(self, parser: ArgumentParser) -> None:
        subparsers = parser.add_subparsers(dest="verb", required=True)
        check = subparsers.add_parser("check", help="run every check of a cluster")
        check.add_argument("name", help="the cluster's short name")
        check.add_argument(
            "--user",
            default="",
            help="a Sluice user name or a Unix user to log in as (default: a member of a namespace)",
        )
        check.add_argument("--json", action="store_true", help="print one JSON object")

    def handle(self, *args: Any, **options: Any) -> None:
        with translation.override(console_language()):
            self._check(options)

    def _check(self, options: dict[str, Any]) -> None:
        cluster = find_cluster(options["name"])
        try:
            unix_user, namespaces = doctor.select_test_account(cluster, options["user"])
        except IdentityRefused as refused:
            raise CommandError(translate(refused.user_message)) from refused
        results = []
        for result in doctor.check_cluster(cluster, unix_user=unix_user, namespaces=namespaces):
            results.append(result)
            if not options["json"]:
                self._print(result)
        if options["json"]:
            self.stdout.write(
                json.dumps(
                    {"ok": doctor.all_ok(results), "lines": [asdict(result) for result in results]},
                    indent=1,
                )
            )
        if not doctor.all_ok(results):
            raise SystemExit(1)

    def _print(self, result: CheckResult) -> None:
        style = {
            CheckOutcome.OK: self.style.SUCCESS,
            CheckOutcome.WARN: self.style.WARNING,
            CheckOutcome.FAIL: self.style.ERROR,
            CheckOutcome.NOT_TRIED: self.style.NOTICE,
        }[result.outcome]
        label = f"{result.outcome.upper():9}"
        self.stdout.write(f"{style(label)}  {translate(result.title)}: {translate(result.found)}")
        if result.remedy:
            self.stdout.write(f"{'':9}  → {translate(result.remedy)}")


def find_cluster(name: str) -> Cluster:
    cluster = Cluster.objects.filter(name=name).first()
    if cluster is None:
        names = ", ".join(Cluster.objects.values_list("name", flat=True)) or gettext("none yet")
        raise CommandError(
            gettext("There is no cluster “%(name)s”. There are: %(known)s.")
            % {"name": name, "known": names}
        )
    return cluster
