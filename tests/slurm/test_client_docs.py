"""Runs the examples of docs/cli.md and docs/client.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sluice_server import RunningSluice

pytestmark = pytest.mark.cluster
CLIENT = Path(__file__).resolve().parents[2] / "client" / "src"
DOCS = Path(__file__).resolve().parents[2] / "docs"


def environment(sluice_server: RunningSluice, home: Path) -> dict[str, str]:
    return {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(CLIENT),
        "SLUICE_URL": sluice_server.url,
        "SLUICE_TOKEN": sluice_server.token("alice"),
    }


def test_examples_of_client_md_run(sluice_server: RunningSluice, tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", (DOCS / "client.md").read_text(), re.M | re.S)
    assert len(examples) >= 7
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(examples)],
        cwd=tmp_path,
        env=environment(sluice_server, tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr + sluice_server.log[-3000:]


def test_examples_of_cli_md_run(sluice_server: RunningSluice, tmp_path: Path) -> None:
    text = (DOCS / "cli.md").read_text()
    text = text[text.index("<!-- run: begin -->") : text.index("<!-- run: end -->")]
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.M | re.S)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) >= 9
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment(sluice_server, tmp_path),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    with zipfile.ZipFile(tmp_path / "digits-results.zip") as archive:
        assert "model.json" in archive.namelist()
    assert (tmp_path / "digits-code.zip").exists()


def test_every_command_is_documented(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "help"],
        env={"HOME": str(tmp_path), "LANG": "C.UTF-8", "PYTHONPATH": str(CLIENT)},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = done.stdout.partition("Commands:")[2].splitlines()
    names = [line.split()[0] for line in listed if re.match(r"  \w", line)]
    text = (DOCS / "cli.md").read_text()
    assert len(names) > 20
    assert [name for name in names if f"`{name}" not in text] == []
