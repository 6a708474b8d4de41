"""Django's makemessages, which also extracts the templates of `core.messages.msg` and `msg_plural`."""

from __future__ import annotations

from django.core.management.commands import makemessages


class Command(makemessages.Command):
    xgettext_options = [
        *makemessages.Command.xgettext_options,
        "--keyword=msg:2",
        "--keyword=msg_plural:2,3",
    ]
