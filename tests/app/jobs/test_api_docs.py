"""Runs the shell examples of docs/api.md against a live server."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from accounts.tokens import create_token
from jobs.models import Job
from tests.app.scenario import make_scenario

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "api.md"


def shell_examples() -> str:
    return "\n".join(
        re.findall(r"^```sh\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    )


@pytest.mark.django_db(transaction=True)
def test_shell_examples_of_api_docs_run(live_server: Any, settings: Any, tmp_path: Path) -> None:
    settings.UPLOAD_DIR = tmp_path / "uploads"
    scenario = make_scenario()
    scenario.alice.set_password("correct horse")
    scenario.alice.save()
    _token, secret = create_token(
        user=scenario.alice,
        name="docs",
        scope="write",
        expires_at=timezone.now() + timedelta(days=1),
    )
    script = shell_examples()
    assert script.count("curl ") > 15
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "SLUICE_URL": live_server.url,
            "SLUICE_TOKEN": secret,
            "SLUICE_USER": "alice",
            "SLUICE_PASSWORD": "correct horse",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
    names = set(Job.objects.filter(deleted_at=None).values_list("name", flat=True))
    sweep = {"sweep-1", "sweep-2", "sweep-3"}
    assert names == {"with-secret", "with-code", "hello-again", "echo", *sweep}
