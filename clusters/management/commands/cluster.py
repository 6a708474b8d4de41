"""`manage.py cluster check NAME`: prints what the doctor finds, a line a link."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from clusters import doctor
from clusters.access import roles_of
from clusters.doctor import Line, Outcome
from clusters.errors import IdentityRefused
from clusters.models import Cluster, Membership, Namespace, unix_user_for

if TYPE_CHECKING:
    from gateway.models import User


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
        cluster = find_cluster(options["name"])
        unix_user, namespaces = someone_on(cluster, options["user"])
        lines = []
        for line in doctor.examine_cluster(cluster, unix_user=unix_user, namespaces=namespaces):
            lines.append(line)
            if not options["json"]:
                self._print(line)
        if options["json"]:
            self.stdout.write(json.dumps(doctor.to_json(lines), indent=1))
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
        self.stdout.write(f"{paint(label)}  {line.title}: {line.found}")
        if line.remedy:
            self.stdout.write(f"{'':9}  → {line.remedy}")


def find_cluster(name: str) -> Cluster:
    cluster = Cluster.objects.filter(name=name).first()
    if cluster is None:
        known = ", ".join(Cluster.objects.values_list("name", flat=True)) or "none yet"
        raise CommandError(f"There is no cluster “{name}”. There are: {known}.")
    return cluster


def someone_on(cluster: Cluster, wanted: str) -> tuple[str, list[Namespace]]:
    """The Unix user to try (the one asked for, or of the first member who has one) and the namespaces,
    theirs first: that is where a node is tried."""
    namespaces = list(cluster.namespaces.filter(active=True))
    people = get_user_model().objects.filter(is_active=True).order_by("username")
    if wanted:
        person = people.filter(username=wanted).first()
        if person is None:
            # A Unix user by name; the doctor's own links refuse root and low UIDs.
            return wanted, namespaces
        try:
            return unix_user_for(person, cluster), _theirs_first(person, namespaces)
        except IdentityRefused as refused:
            raise CommandError(refused.user_message) from refused
    members = Membership.objects.filter(namespace__in=namespaces)
    for person in people.filter(pk__in=members.exclude(role=Membership.Role.VIEWER).values("user")):
        try:
            return unix_user_for(person, cluster), _theirs_first(person, namespaces)
        except IdentityRefused:
            continue
    return "", namespaces


def _theirs_first(person: User, namespaces: list[Namespace]) -> list[Namespace]:
    roles = roles_of(person)
    return sorted(namespaces, key=lambda namespace: namespace.pk not in roles)
