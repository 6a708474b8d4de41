"""`manage.py ssh_ca` creates the CA key with mode 0600 and prints only the public key."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from pytest_django.fixtures import Settings

from clusters.validators import parse_host_key


@pytest.fixture
def key_file(settings: Settings, tmp_path: Path) -> Path:
    settings.SSH_CA_KEY_FILE = tmp_path / "ssh" / "ca_key"
    return tmp_path / "ssh" / "ca_key"


def run_ssh_ca(**options: object) -> str:
    out = io.StringIO()
    call_command("ssh_ca", stdout=out, **options)
    return out.getvalue()


def test_key_is_created_once_and_only_public_key_is_printed(key_file: Path) -> None:
    public = run_ssh_ca(public_key=True)
    assert parse_host_key(public) in public
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert run_ssh_ca(public_key=True) == public
    text = run_ssh_ca()
    assert public.strip() in text
    assert "PRIVATE" not in text


def test_world_readable_key_is_rejected_with_remedy(key_file: Path) -> None:
    run_ssh_ca()
    key_file.chmod(0o644)
    with pytest.raises(CommandError, match="chmod"):
        run_ssh_ca()
