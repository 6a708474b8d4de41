"""The fixtures themselves: sign-in works, and an error in the console fails the test."""

from __future__ import annotations

import pytest

from tests.browser.conftest import ConsoleErrors, OpenPage

pytestmark = [pytest.mark.browser, pytest.mark.cluster]


def test_a_person_signs_in_and_sees_no_error(open_page: OpenPage) -> None:
    page = open_page("alice")
    page.goto("/")
    assert page.locator("h1").first.is_visible()


def test_an_error_in_the_console_is_a_failure(
    open_page: OpenPage, console_errors: ConsoleErrors
) -> None:
    page = open_page("alice")
    page.evaluate("console.error('broken on purpose')")
    page.wait_for_timeout(100)
    with pytest.raises(AssertionError, match="broken on purpose"):
        console_errors.check()
    console_errors.messages.clear()
