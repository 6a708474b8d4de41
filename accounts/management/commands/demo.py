"""`manage.py demo`: creates the demo users with random passwords and stores these in a file with mode 0600."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from accounts.models import User

# User name → first name. carol belongs to no namespace.
DEMO_USERS = {"admin": "Administrator", "alice": "Alice", "bob": "Bob", "carol": "Carol"}
# No vowels, so that no password contains a word; no characters that look alike (l and 1, o and 0).
PASSWORD_ALPHABET = "bcdfghjkmnpqrstvwxz23456789"  # noqa: S105


def generate_password() -> str:
    return "-".join("".join(secrets.choice(PASSWORD_ALPHABET) for _ in range(4)) for _ in range(3))


def read_passwords(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def write_passwords(path: Path, passwords: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temp_path = path.with_name(path.name + ".new")
    temp_path.unlink(missing_ok=True)
    handle = os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{name} {password}\n" for name, password in passwords.items())
    temp_path.replace(path)


class Command(BaseCommand):
    help = (
        "Make the demo's people (admin, alice, bob, carol) where they are missing and print how to "
        "sign in. Nobody's password or rights are changed."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEMO:
            raise CommandError("Demo people belong to a demo only: set SLUICE_DEMO=1.")
        path = settings.SLUICE_HOME / "demo-passwords"
        passwords = read_passwords(path)
        for name, first_name in DEMO_USERS.items():
            if User.objects.filter(username=name).exists():
                continue
            # The password is stored first, so that no user exists whose password was lost in a crash.
            passwords.setdefault(name, generate_password())
            write_passwords(path, passwords)
            with transaction.atomic():
                User.objects.create_user(
                    name,
                    password=passwords[name],
                    first_name=first_name,
                    is_superuser=name == "admin",
                    is_staff=name == "admin",
                )
        self.stdout.write("Sign in as:")
        for name in DEMO_USERS:
            user = User.objects.get(username=name)
            is_valid = name in passwords and user.check_password(passwords[name])
            self.stdout.write(f"  {name:8} {passwords[name] if is_valid else '(password changed)'}")
        self.stdout.write(f"(kept in {path})")
        if settings.METRICS_TOKEN_FILE.exists():
            self.stdout.write(f"Bearer token of /metrics: {settings.METRICS_TOKEN_FILE}")
