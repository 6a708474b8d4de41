"""HTML with which notebooks show jobs, and units. The HTML functions escape all text of the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_COLORS = {
    "QUEUED": "#667382",
    "PENDING": "#b76e00",
    "RUNNING": "#0a66c2",
    "COMPLETED": "#1f7a3d",
    "FAILED": "#b42318",
    "STOPPED": "#667382",
}


def memory_text(mib: int) -> str:
    """Format memory as the pages do, in binary units: 512 MB, 1.5 GB, 1024 GB."""
    if mib < 1024:
        return f"{mib} MB"
    gib = mib / 1024
    return f"{gib:.1f}".removesuffix(".0") + " GB" if gib < 100 else f"{gib:.0f} GB"


def badge(state: str) -> str:
    color = _COLORS.get(state, "#667382")
    return (
        f'<span style="background:{color};color:#fff;border-radius:4px;padding:1px 8px">'
        f"{escape(state)}</span>"
    )


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Return a table with one row per pair of name and value. The values are HTML that is already escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{value}</td></tr>'
        for name, value in rows
    )
    return f"<table>{cells}</table>"


def job_html(raw: Mapping[str, Any]) -> str:
    reason = raw.get("reason") or {}
    message = str(reason.get("text") or reason.get("slurm_text") or "")
    resources = (
        f"{raw.get('tasks')} × task, {raw.get('cpus')} CPU, {memory_text(raw.get('mem_mib') or 0)}"
    )
    if raw.get("gpus"):
        resources += f", {raw.get('gpus')} GPU {raw.get('gpu_type') or ''}"
    rows = [
        ("job", f"<b>{escape(str(raw.get('name', '')))}</b>"),
        ("state", badge(str(raw.get("state", ""))) + (f" {escape(message)}" if message else "")),
        ("id", f"<code>{escape(str(raw.get('id', '')))}</code>"),
        ("namespace", escape(str(raw.get("namespace", "")))),
        ("resources", escape(resources)),
    ]
    if raw.get("slurm_job_id"):
        rows.append(("Slurm id", escape(str(raw["slurm_job_id"]))))
    if raw.get("exit_code") is not None:
        rows.append(("exit code", escape(str(raw["exit_code"]))))
    return table(rows)
