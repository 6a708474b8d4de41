"""Fixtures: Chromium against a running Sluice. An error in the browser console fails the test.

`open_page` opens a page as a signed-in user with the given width, theme and language:
    page = open_page("alice", width=390, theme="dark", language="zh-hans"); page.goto("/jobs")
URLs are relative to the server. SLUICE_SCREENSHOTS names a directory for a screenshot of every page.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    expect,
    sync_playwright,
)

from tests.sluice_server import RunningSluice

TIMEOUT_MS = 30_000  # generous: the machine may be under load
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
OpenPage = Callable[..., Page]
expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "Chromium is not installed; scripts/test installs it."
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=CHROMIUM_ARGUMENTS)
        yield launched
        launched.close()


class ConsoleErrors:
    """Errors in the browser's console; a test lists the expected ones in `expected`."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.expected: list[str] = []

    def console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.messages.append(f"{message.text} ({message.location.get('url', '')})")

    def check(self) -> None:
        unexpected = [
            text for text in self.messages if not any(part in text for part in self.expected)
        ]
        assert not unexpected, "errors in the browser: " + "\n".join(unexpected)


@pytest.fixture
def console_errors() -> Iterator[ConsoleErrors]:
    errors = ConsoleErrors()
    yield errors
    errors.check()


@pytest.fixture
def open_page(
    browser: Browser, sluice_server: RunningSluice, console_errors: ConsoleErrors, request: Any
) -> Iterator[OpenPage]:
    contexts: list[BrowserContext] = []

    def open_page(
        user: str | None = "alice",
        *,
        width: int = 1280,
        height: int = 900,
        theme: str = "light",
        language: str = "en",
    ) -> Page:
        context = browser.new_context(
            base_url=sluice_server.url, viewport={"width": width, "height": height}
        )
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("console", console_errors.console)
        page.on("pageerror", lambda error: console_errors.messages.append(str(error)))
        if user is not None:
            sign_in(page, user, sluice_server.passwords[user])
        context.add_cookies(
            [
                {"name": "sluice_theme", "value": theme, "url": sluice_server.url},
                {"name": "django_language", "value": language, "url": sluice_server.url},
            ]
        )
        return page

    yield open_page
    for number, context in enumerate(contexts):
        save_screenshot(context, f"{request.node.name}-{number}")
        context.close()


def sign_in(page: Page, user: str, password: str) -> None:
    """Sign in on the login page and wait for the page that it redirects to."""
    if "/login" not in page.url:
        page.goto("/login")
    page.fill("[name=username]", user)
    page.fill("[name=password]", password)
    page.click("form:has([name=password]) button")
    page.wait_for_url(lambda url: "/login" not in url)


def save_screenshot(context: BrowserContext, name: str) -> None:
    if folder := os.environ.get("SLUICE_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        for page in context.pages:
            page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
