"""`manage.py changepassword`: Django's command, extended to revoke the person's API tokens."""

from __future__ import annotations

import getpass
from typing import Any

from django.contrib.auth.management.commands.changepassword import Command as DjangoCommand

from accounts.models import User
from accounts.tokens import revoke_user_tokens


class Command(DjangoCommand):
    def handle(self, *args: Any, **options: Any) -> str | None:
        # Raises CommandError if the password was not changed.
        output = super().handle(*args, **options)
        name = options["username"] or getpass.getuser()
        count = revoke_user_tokens(user=User.objects.get_by_natural_key(name))
        if count:
            self.stdout.write(f"{count} API tokens of {name} no longer work.")
        return output
