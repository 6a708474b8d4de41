"""The browser fixtures: sign-in works, and a console error fails the test."""

from __future__ import annotations

import pytest

from tests.browser.conftest import ConsoleErrors, OpenPage

pytestmark = [pytest.mark.browser, pytest.mark.cluster]


def test_sign_in_gives_no_console_error(open_page: OpenPage) -> None:
    page = open_page("alice")
    page.goto("/")
    assert page.locator("h1").first.is_visible()


def test_console_error_fails_the_test(open_page: OpenPage, console_errors: ConsoleErrors) -> None:
    page = open_page("alice")
    page.evaluate("console.error('broken on purpose')")
    page.wait_for_timeout(100)
    with pytest.raises(AssertionError, match="broken on purpose"):
        console_errors.check()
    console_errors.messages.clear()
