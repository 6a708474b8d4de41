"""Accessibility violations found by axe-core."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page

AXE = Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js"
# The rules that depend on the theme. Running all rules for every theme takes too long.
COLOUR_RULES = ["color-contrast", "link-in-text-block"]


def find_serious_violations(page: Page, theme: str) -> list[str]:
    """Return serious and critical violations; checks all rules in the light theme, only colour rules in others."""
    options: dict[str, object] = {"resultTypes": ["violations"]}
    if theme != "light":
        options["runOnly"] = COLOUR_RULES
    page.evaluate(AXE.read_text())
    violations = page.evaluate("options => axe.run(document, options)", options)["violations"]
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary'][:300]}"
        for violation in violations
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def has_horizontal_scroll(page: Page) -> bool:
    wide: bool = page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    return wide
