"""`manage.py ssh_ca` prints configuration lines that sshd accepts."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.core.management import call_command
from pytest_django.fixtures import Settings

if TYPE_CHECKING:
    from tests.conftest import EmbeddedCluster

pytestmark = pytest.mark.cluster


def test_ca_is_trusted_from_the_given_address_only(
    cluster: EmbeddedCluster, settings: Settings, tmp_path: Path
) -> None:
    settings.SSH_CA_KEY_FILE = tmp_path / "ssh" / "ca_key"
    out = io.StringIO()
    call_command("ssh_ca", address="192.0.2.7", stdout=out)
    lines = out.getvalue()
    config = lines[lines.index("Match Address") : lines.index("# 3.")]
    file = tmp_path / "sshd_config"
    file.write_text(f"HostKey {cluster.dir}/ssh/host_key\n{config}")

    def trusted_from(address: str) -> bool:
        shown = subprocess.run(
            ["/usr/sbin/sshd", "-T", "-f", file, "-C", f"addr={address},user=alice,host=x"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return "trustedusercakeys /etc/ssh/sluice_ca.pub" in shown

    assert trusted_from("192.0.2.7")
    assert not trusted_from("192.0.2.8")
