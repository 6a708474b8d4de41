"""Executes the example notebook against a running Sluice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sluice_server import RunningSluice

pytestmark = pytest.mark.cluster
CLIENT = Path(__file__).resolve().parents[2] / "client" / "src"
NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "examples" / "frameworks.ipynb"

# In a separate process: a kernel has its own event loop and emits warnings.
EXECUTE = """
import sys, nbformat, nbclient
book = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
nbformat.write(book, sys.argv[2])
"""


def text_of(cell: dict[str, Any]) -> str:
    found = []
    for output in cell["outputs"]:
        assert output["output_type"] != "error", output
        found.append("".join(output.get("text") or output.get("data", {}).get("text/plain", "")))
    return "".join(found)


def test_notebook_runs(sluice_server: RunningSluice, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(NOTEBOOK), "done.ipynb"],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "PYTHONPATH": str(CLIENT),
            "SLUICE_URL": sluice_server.url,
            "SLUICE_TOKEN": sluice_server.token("alice"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-5000:] + sluice_server.log[-3000:]
    cells = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    outputs = [text_of(cell) for cell in cells if cell["cell_type"] == "code"]
    counts = "of {'chief': 1, 'ps': 1, 'worker': 2}"
    assert outputs[5].splitlines() == [
        f"chief 0 {counts}",
        f"ps 0 {counts}",
        f"worker 0 {counts}",
        f"worker 1 {counts}",
    ]
    assert outputs[7] == "rank 0 of 3: the sum of all ranks is 3\n"
    assert outputs[9].splitlines() == [
        f"rank {n} of 3: the sum of all ranks is 3" for n in range(3)
    ]
    assert outputs[10] == "('COMPLETED', 'COMPLETED')"
    # The job has an HTML representation.
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    assert any("COMPLETED" in "".join(data.get("text/html", "")) for data in shown)


def test_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    assert all(cell.get("execution_count") is None for cell in cells)
