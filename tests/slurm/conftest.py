"""Fixtures of the tests on the embedded cluster."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from django.core.management import call_command
from pytest_django.fixtures import Settings

from accounts.models import User
from clusters import connections
from clusters.models import Cluster
from tests.conftest import EmbeddedCluster


@pytest.fixture
def registered(
    cluster: EmbeddedCluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """The embedded cluster's row, as `manage.py embedded` creates it, and the users alice, bob and carol."""
    settings.SSH_CA_KEY_FILE = cluster.ca_key
    for name in ("alice", "bob", "carol"):
        User.objects.create_user(name)
    for name, value in cluster.env.items():
        if name.startswith("SLUICE_EMBEDDED_") or name == "SLURM_CONF":
            monkeypatch.setenv(name, value)
    call_command("embedded", stdout=io.StringIO())
    connections.close_all_connections()
    yield Cluster.objects.get(name="embedded")
    connections.close_all_connections()
