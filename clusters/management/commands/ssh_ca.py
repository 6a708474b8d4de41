"""`manage.py ssh_ca`: prints the public key of Sluice's certificate authority and the sshd configuration for it."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from clusters.connections import certificate_authority
from clusters.errors import ClusterError

INSTRUCTIONS = """\
# On the login node, as root.
# 1. Put this line into /etc/ssh/sluice_ca.pub (owner root, mode 0644):
{public}

# 2. Put these lines into a new file /etc/ssh/sshd_config.d/50-sluice.conf, or at the end of sshd_config.
#    {address} is Sluice's address as seen by the login node; certificates are accepted only from there.
Match Address {address}
    TrustedUserCAKeys /etc/ssh/sluice_ca.pub
    PermitRootLogin no
    AllowTcpForwarding local
    AllowAgentForwarding no
    X11Forwarding no
Match all

# 3. sshd -t && systemctl reload sshd     (the service is called ssh on Debian and Ubuntu)
# 4. Here: manage.py cluster check NAME

# A certificate is valid for one Unix user and for minutes. The private key stays on this machine:
# {private}
"""


class Command(BaseCommand):
    help = "Print the public key of the certificate authority (created on first use) and the sshd configuration."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--address",
            default="ADDRESS_OF_SLUICE",
            help="Sluice's address as seen by the login node",
        )
        parser.add_argument("--public-key", action="store_true", help="print only the public key")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            public = certificate_authority().public_key_line()
        except (ClusterError, OSError) as error:
            raise CommandError(str(error)) from error
        if options["public_key"]:
            self.stdout.write(public)
            return
        self.stdout.write(
            INSTRUCTIONS.format(
                public=public, address=options["address"], private=settings.SSH_CA_KEY_FILE
            ),
            ending="",
        )
