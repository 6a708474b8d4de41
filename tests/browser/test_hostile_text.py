"""Text of a job is only shown: HTML does not execute, control sequences of a log affect nothing outside the log."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenPage
from tests.browser.test_pages import open_url, state_of, submit, wait_for
from tests.sluice_server import RunningSluice

pytestmark = [pytest.mark.cluster, pytest.mark.browser]

# Sets window.executed if it becomes an element, and requests a file of another origin.
HTML = '<img src=x onerror="window.executed=1"><script src="https://evil.example/x.js"></script>'
# In file names: no slash.
NAME = "<img src=x onerror=window.executed=1>"
# Title, clipboard, link, palette, alternate screen, mouse reports, device report, C1 variants, reset of the colours.
COMMAND = r"""
printf '\033]0;CHANGED\007\033]2;CHANGED\007\033]52;c;Q0hBTkdFRA==\007\033]10;#ffffff\007'
printf '\033]8;;https://evil.example/\033\\a link\033]8;;\033\\\n'
printf '\302\2352;CHANGED\302\234\302\23352;c;Q0hBTkdFRA==\n'
printf '\033[?1049h\033[?1003h\033[?1006h\033[6n\033[21t\033P$q m\033\\'
printf '%s\n' "$HOSTILE_HTML"
printf 'javascript:window.executed=1 https://evil.example/\n'
cd "$LOG_DIR/.."
mkdir -p "$HOSTILE_NAME dir" && echo '<script>window.executed=1</script>' > "$HOSTILE_NAME.html"
touch "$(printf 'esc\033]0;CHANGED\007name')" "$(printf 'two\nlines')"
cp "$HOSTILE_NAME.html" image.svg
# The state file of the task, to which the wrapper then cannot append.
state="$LOG_DIR/../tasks/worker-0.state"
printf 'role=worker\nindex=0\nstate=ended\nhost=%s\nip=%s\nports=%s:1;\ngpus=%s\nreason=%s\nimage=%s\nexit_code=3\n' \
  "$HOSTILE_HTML" "$HOSTILE_HTML" "$NAME" "$HOSTILE_HTML" "$HOSTILE_HTML" "$HOSTILE_HTML" > "$state.forged" && chmod 400 "$state.forged" && mv -f "$state.forged" "$state" && chmod 500 "$LOG_DIR/../tasks" && echo forged
echo the very last line
exit 3
"""


@pytest.fixture(scope="module")
def hostile_job(sluice_server: RunningSluice) -> str:
    role = {
        "name": "worker",
        "title": HTML[:60],
        "taskNumber": 1,
        "command": COMMAND,
        "cpuNumber": 1,
        "memoryMB": 200,
    }
    job = submit(
        sluice_server,
        "hostile",
        COMMAND,
        description=HTML,
        labels={"name": NAME},
        taskRoles=[role],
        jobEnvs={"HOSTILE_HTML": HTML, "HOSTILE_NAME": NAME},
    )
    wait_for(lambda: state_of(sluice_server, job) == "FAILED")
    return job


def watch(page: Page) -> list[str]:
    """Record what must not happen: dialogs, new pages, requests to other origins."""
    happened: list[str] = []
    page.on("dialog", lambda dialog: happened.append(f"dialog {dialog.message}"))
    page.context.on("page", lambda opened: happened.append(f"page {opened.url}"))
    page.on(
        "request",
        lambda request: happened.append(request.url) if "evil.example" in request.url else None,
    )
    return happened


def screen_text(page: Page) -> str:
    text: str = page.evaluate(
        "(() => { const b = document.querySelector('log-view').terminal.buffer.active;"
        " return [...Array(b.length).keys()].map(i => b.getLine(i).translateToString(true)).join('\\n'); })()"
    )
    return text


def check_nothing_executed(page: Page, happened: list[str]) -> None:
    assert page.evaluate("window.executed") is None
    assert page.locator("img[src=x], script[src*=evil]").count() == 0
    assert not happened


def test_text_of_a_job_is_not_executed(
    open_page: OpenPage, hostile_job: str, sluice_server: RunningSluice
) -> None:
    page = open_page("alice")
    happened = watch(page)
    for address in (
        "/",
        "/jobs?scope=all",
        f"/jobs/{hostile_job}",
        f"/jobs/{hostile_job}#file",
        f"/jobs/{hostile_job}#script",
        f"/submit?clone={hostile_job}",
    ):
        open_url(page, address)
        check_nothing_executed(page, happened)
    # The forged state file was read: its text is in the table of tasks.
    open_url(page, f"/jobs/{hostile_job}")
    expect(page.locator("#overview, main").first).to_contain_text("onerror")
    tasks = sluice_server.api("GET", f"jobs/{hostile_job}/tasks").json()["items"]
    assert HTML[:20] in tasks[0]["node"]
    open_url(page, f"/jobs/{hostile_job}#results")
    names = page.locator("[data-files] td:first-child")
    expect(names.filter(has_text=NAME).first).to_be_visible()
    check_nothing_executed(page, happened)
    page.locator("[data-files] button", has_text=NAME).click()
    expect(page.locator("[data-files-path]")).to_contain_text(NAME)
    check_nothing_executed(page, happened)
    # A person's HTML or SVG file is a download, never a page of Sluice's origin.
    for name in (f"{NAME}.html", "image.svg"):
        url = f"jobs/{hostile_job}/files/download"
        response = sluice_server.api("GET", url, params={"path": name})
        assert response.headers["Content-Disposition"].startswith("attachment")
        assert response.headers["Content-Type"] == "application/octet-stream"
        assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_control_sequences_of_a_log_affect_only_the_log(
    open_page: OpenPage, hostile_job: str, sluice_server: RunningSluice
) -> None:
    page = open_page("alice")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    happened = watch(page)
    page.goto(f"/jobs/{hostile_job}")
    title = page.title()
    page.evaluate("navigator.clipboard.writeText('mine')")
    page.goto(f"/jobs/{hostile_job}#logs")
    sent: list[Any] = []
    page.on("websocket", lambda socket: socket.on("framesent", lambda data: sent.append(data)))
    page.reload()
    wait_for(lambda: "the very last line" in screen_text(page))
    terminal = "document.querySelector('log-view').terminal"
    # The text stays in the normal screen and can be selected; no report was typed into the websocket.
    assert page.evaluate(f"{terminal}.buffer.active.type") == "normal"
    assert page.evaluate(f"{terminal}.modes.mouseTrackingMode") == "none"
    assert not sent
    assert HTML[:15] in screen_text(page)
    assert "a link" in screen_text(page)
    for text in ("a link", "javascript:"):
        box = page.locator(".xterm-rows > div", has_text=text).bounding_box()
        assert box
        page.mouse.move(box["x"] + 10, box["y"] + 5)
        page.mouse.click(box["x"] + 10, box["y"] + 5)
    assert page.title() == title
    assert page.evaluate("navigator.clipboard.readText()") == "mine"
    check_nothing_executed(page, happened)
