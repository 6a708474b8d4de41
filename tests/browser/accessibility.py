"""What axe-core finds wrong with a page."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

AXE = Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js"
# All that a theme can change. The rest is the same in every theme, and axe takes long for it.
RULES_OF_COLOUR = ["color-contrast", "link-in-text-block"]


def serious_faults(page: Page, theme: str) -> list[str]:
    """Serious and critical ones: of every kind in the light theme, of its colours in another."""
    options: dict[str, object] = {"resultTypes": ["violations"]}
    if theme != "light":
        options["runOnly"] = RULES_OF_COLOUR
    page.evaluate(AXE.read_text())
    found = page.evaluate("options => axe.run(document, options)", options)["violations"]
    return [
        f"{fault['id']}: {node['target']} {node['failureSummary'][:300]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


def is_too_wide(page: Page) -> bool:
    """Whether it scrolls sideways."""
    wide: bool = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    return wide
