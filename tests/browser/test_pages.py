"""Every page in Chromium on a real cluster: accessibility, narrow screens, live updates, languages."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.accessibility import find_serious_violations, has_horizontal_scroll
from tests.browser.conftest import OpenPage, sign_in
from tests.sluice_server import RunningSluice

pytestmark = [pytest.mark.cluster, pytest.mark.browser]

JOB_TIMEOUT_MS = 90_000  # for a job to pass through Slurm on a busy machine

# Prints colours, a progress bar with \r, Chinese and many lines.
PRINTER = r"""printf '\033[31mred text\033[0m 训练开始\n'
for i in $(seq 1 40); do printf '\rprogress %d%%' $i; sleep 0.02; done; printf '\n'
for i in $(seq 1 300); do echo "line number $i"; done
while [ ! -e go-on ]; do sleep 0.3; done
echo the very last line"""


def submit(
    sluice_server: RunningSluice, name: str, command: str, user: str = "alice", **more: Any
) -> str:
    role = {"name": "worker", "taskNumber": 1, "command": command, "cpuNumber": 1, "memoryMB": 200}
    document = {
        "jobName": f"{name}-{time.monotonic_ns() % 10**9}",
        "image": "busybox",
        "namespace": "default",
        "taskRoles": [role],
        **more,
    }
    response = sluice_server.api("POST", "jobs", user, json=document)
    assert response.status_code == 201, response.text
    found: str = response.json()["id"]
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.3)


def state_of(sluice_server: RunningSluice, job: str) -> str:
    state: str = sluice_server.api("GET", f"jobs/{job}").json()["state"]
    return state


@pytest.fixture(scope="module")
def ended_job(sluice_server: RunningSluice) -> str:
    job = submit(sluice_server, "looked-at", "echo hello; exit 3")
    wait_for(lambda: state_of(sluice_server, job) == "FAILED")
    return job


def all_pages(job: str) -> list[str]:
    return [
        "/",
        "/jobs?scope=all",
        "/jobs?q=there-is-no-such-job&owner=nobody",
        f"/jobs/{job}",
        f"/jobs/{job}#logs",
        f"/jobs/{job}#file",
        f"/jobs/{job}#results",
        "/capacity",
        "/clusters",
        "/clusters/embedded",
        "/namespaces",
        "/namespaces/1",
        "/new-namespace",
        "/audit",
        "/audit?about=settings",
        "/profile",
        "/profile/password",
        "/tokens",
        "/submit",
        "/templates",
        "/templates/new",
    ]


def open_url(page: Page, address: str) -> None:
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_load_state("load")
    expect(page.locator("main h1, main h2").first).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_have_no_serious_accessibility_violations(
    open_page: OpenPage, ended_job: str, theme: str
) -> None:
    page = open_page("admin", theme=theme, width=1280)
    violations, wide_pages = {}, []
    for address in all_pages(ended_job):
        open_url(page, address)
        # A button that is changing its colour has another contrast for a moment.
        page.add_style_tag(content="* { transition: none !important; }")
        if found := find_serious_violations(page, theme):
            violations[address] = found
        if has_horizontal_scroll(page):
            wide_pages.append(address)
    anonymous = open_page(None, theme=theme)
    anonymous.goto("/login")
    if found := find_serious_violations(anonymous, theme):
        violations["/login"] = found
    assert not violations
    assert not wide_pages


def test_no_page_scrolls_horizontally_on_a_phone(open_page: OpenPage, ended_job: str) -> None:
    page = open_page("admin", width=390, height=844)
    wide_pages = []
    for address in all_pages(ended_job):
        open_url(page, address)
        if has_horizontal_scroll(page):
            wide_pages.append(address)
    assert not wide_pages


# Names and units that are identical in every language, and data.
UNTRANSLATED_NAMES = re.compile(
    r"""(?ix)\A(?:
    sluice | slurm | english | yaml | json | tar | api | cpus? | gpus? | qos | mpi | ssh | uid | id | url | ip
    | [kmg]i?b | b | s | d | h | min | a100 | v100 | python | busybox | apptainer | ddp | pytorch | tensorflow
    | sbatch | srun | batch | slurmctld | curl | docker | jupyter | horovod | mnist
    )\Z"""
)
# Elements with untranslated data.
DATA_SELECTOR = "code, .quick-start, pre, kbd, time, option, .log-screen, [lang=en], .cell-name, .ace_editor, .doctor, .xterm, textarea"
COLLECT_TEXT_JS = """(skip) => {
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, box = node.parentElement;
    if (!box || box.closest(skip) || box.closest("script, style, template, noscript")) continue;
    found.push(node.textContent);
  }
  for (const each of document.querySelectorAll("[aria-label], [placeholder], [title]")) {
    if (each.closest(skip)) continue;
    found.push(each.getAttribute("aria-label") ?? "", each.getAttribute("placeholder") ?? "");
  }
  return found;
}"""


def untranslated(page: Page, known: set[str]) -> set[str]:
    """Texts with English words that are neither names nor data."""
    found = set()
    for text in page.evaluate(COLLECT_TEXT_JS, DATA_SELECTOR):
        words = [word for word in re.findall(r"[A-Za-z]{2,}", text) if word.lower() not in known]
        unknown = [word for word in words if not UNTRANSLATED_NAMES.match(word)]
        # Two unknown words are a phrase; a single one may be the name of a node or user.
        if len(unknown) >= 2 and not re.search(r"[/@_=:.]\S|\d", text):
            found.add(" ".join(text.split())[:100])
    return found


def test_no_untranslated_string(
    open_page: OpenPage, sluice_server: RunningSluice, ended_job: str
) -> None:
    page = open_page("admin", language="zh-hans")
    names = {
        "admin",
        "alice",
        "bob",
        "carol",
        "embedded",
        "default",
        "debug",
        "cpu",
        "gpu",
        "looked",
        # values in explanations of fields, and a command
        *("pack", "separate", "auto", "isdebug", "true", "sleep", "infinity"),
        # keyboard keys
        "enter",
        "esc",
        "ctrl",
        "space",
    }
    remaining = {}
    for address in all_pages(ended_job):
        open_url(page, address)
        if found := untranslated(page, names):
            remaining[address] = sorted(found)
    assert not remaining


def test_job_list_updates_live(open_page: OpenPage, sluice_server: RunningSluice) -> None:
    page = open_page("alice")
    page.goto("/jobs")
    page.wait_for_timeout(500)  # until the websocket is open
    job = submit(sluice_server, "comes-in", "sleep 2")
    row = page.locator(f"#job-{job}")
    expect(row).to_be_visible(timeout=JOB_TIMEOUT_MS)
    expect(row.locator(".state")).to_have_text(
        re.compile("Running|Completed"), timeout=JOB_TIMEOUT_MS
    )
    expect(row.locator(".state")).to_have_text("Completed", timeout=JOB_TIMEOUT_MS)


def test_batch_dialog_lists_the_affected_jobs(
    open_page: OpenPage, sluice_server: RunningSluice
) -> None:
    job = submit(sluice_server, "to-be-stopped", "sleep 600")
    ended = submit(sluice_server, "has-ended", "true")
    wait_for(lambda: state_of(sluice_server, ended) == "COMPLETED")
    page = open_page("alice")
    page.goto("/jobs")
    for each in (job, ended):
        page.check(f"#job-{each} input")
    page.click("[data-batch=stop]")
    dialog = page.locator("#batch-dialog")
    expect(dialog).to_contain_text("1 unfinished job will be stopped")
    expect(dialog).to_contain_text("1 job has already ended")
    dialog.locator("[data-go]").click()
    expect(page.locator(f"#job-{job} .state")).to_have_text("Stopped", timeout=JOB_TIMEOUT_MS)
    for each in (job, ended):
        page.check(f"#job-{each} input")
    page.click("[data-batch=delete]")
    expect(dialog).to_contain_text("2 ended jobs and their history will be deleted")
    dialog.locator("[data-go]").click()
    expect(page.locator(f"#job-{job}")).to_have_count(0)


def test_job_page_updates_from_queue_to_end(
    open_page: OpenPage, sluice_server: RunningSluice
) -> None:
    """State, tasks, actions and the log update without a reload."""
    job = submit(sluice_server, "watched", PRINTER)
    page = open_page("alice")
    page.goto(f"/jobs/{job}#logs")
    page.evaluate("window.stillTheSamePage = true")
    log = page.locator("log-view")
    expect(log).to_be_visible()
    screen = lambda: page.evaluate(  # noqa: E731
        "(() => { const t = document.querySelector('log-view').terminal, b = t.buffer.active;"
        " return [...Array(b.length).keys()].map(i => b.getLine(i).translateToString(true)).join('\\n'); })()"
    )
    wait_for(lambda: "line number 300" in screen())
    text = screen()
    assert "训练开始" in text
    # The progress bar is one line, in its final state.
    assert text.count("progress") == 1
    assert "progress 40%" in text
    red = page.evaluate(
        "document.querySelector('log-view').terminal.buffer.active.getLine(0).getCell(0).getFgColor()"
    )
    assert red == 1
    # The log follows its end until the reader scrolls up.
    assert page.evaluate("document.querySelector('log-view').atEnd")
    page.locator(".log-screen").focus()
    page.keyboard.press("Home")
    jump = log.get_by_role("button", name="Jump to end")
    expect(jump).to_be_visible()
    assert not page.evaluate("document.querySelector('log-view').atEnd")
    running_dir = sluice_server.api("GET", f"jobs/{job}/attempts").json()["items"][0]["work_dir"]
    release_job(sluice_server, job, running_dir)
    expect(log.locator(".log-status")).to_contain_text("exit code 0", timeout=JOB_TIMEOUT_MS)
    # New lines do not change the scroll position.
    assert not page.evaluate("document.querySelector('log-view').atEnd")
    jump.click()
    assert page.evaluate("document.querySelector('log-view').atEnd")
    assert "the very last line" in screen()
    # Search, wrap, download.
    log.locator(".log-find").fill("number 123")
    log.locator(".log-find").press("Enter")
    assert (
        page.evaluate("document.querySelector('log-view').terminal.getSelection()") == "number 123"
    )
    log.get_by_role("button", name="Wrap").click()
    with page.expect_download() as download:
        log.get_by_role("link", name="Download").click()
    assert "the very last line" in Path(download.value.path()).read_text()
    expect(page.locator("#job-state .state").first).to_have_text(
        "Completed", timeout=JOB_TIMEOUT_MS
    )
    expect(page.locator("#stop-button")).to_have_count(0)
    expect(page.locator("#retry-button")).to_be_visible()
    page.click("#tab-overview")
    expect(page.locator("#task-rows .state")).to_have_text("succeeded", timeout=JOB_TIMEOUT_MS)
    expect(page.locator("#job-events")).to_contain_text("Submitted.")
    page.click("#tab-results")
    expect(page.locator("[data-files]")).to_contain_text("logs/", timeout=JOB_TIMEOUT_MS)
    assert page.evaluate("window.stillTheSamePage")


def release_job(sluice_server: RunningSluice, job: str, work_dir: str) -> None:
    """Create the file that the printing job waits for."""
    for directory in (Path(work_dir), *(p for p in Path(work_dir).iterdir() if p.is_dir())):
        (directory / "go-on").touch()


def test_page_recovers_after_server_restart(
    open_page: OpenPage, sluice_server: RunningSluice, console_errors: Any
) -> None:
    console_errors.expected += ["WebSocket", "ERR_CONNECTION", "Failed to load resource"]
    job = submit(
        sluice_server,
        "outlives-the-server",
        "for i in 1 2 3 4 5 6 7 8 9; do echo tick $i; sleep 2; done",
    )
    page = open_page("alice")
    page.goto(f"/jobs/{job}#logs")
    page.evaluate("window.stillTheSamePage = true")
    wait_for(lambda: state_of(sluice_server, job) == "RUNNING")
    sluice_server.stop()
    try:
        expect(page.locator("#connection")).to_be_visible(timeout=JOB_TIMEOUT_MS)
    finally:
        sluice_server.start()
    expect(page.locator("#connection")).to_be_hidden(timeout=JOB_TIMEOUT_MS)
    expect(page.locator("#job-state .state").first).to_have_text(
        "Completed", timeout=JOB_TIMEOUT_MS
    )
    expect(page.locator("log-view .log-status")).to_contain_text(
        "exit code 0", timeout=JOB_TIMEOUT_MS
    )
    lines = page.evaluate(
        "(() => { const b = document.querySelector('log-view').terminal.buffer.active;"
        " return [...Array(b.length).keys()].map(i => b.getLine(i).translateToString(true)).filter(l => l.startsWith('tick')); })()"
    )
    # No line is missing or repeated.
    assert lines == [f"tick {number}" for number in range(1, 10)]
    assert page.evaluate("window.stillTheSamePage")


def test_sign_in_after_lost_session_returns_to_the_page(
    open_page: OpenPage, sluice_server: RunningSluice, ended_job: str, console_errors: Any
) -> None:
    console_errors.expected += ["WebSocket"]
    page = open_page("bob")
    page.goto("/jobs?scope=all&q=looked")
    page.context.clear_cookies(name="sessionid")
    page.reload()
    page.wait_for_url(re.compile("/login"))
    sign_in(page, "bob", sluice_server.passwords["bob"])
    expect(page).to_have_url(re.compile(r"/jobs\?scope=all&q=looked"))


def test_pages_can_be_used_by_keyboard(open_page: OpenPage, ended_job: str) -> None:
    page = open_page("alice")
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to content")
    page.keyboard.press("Escape")
    page.locator("body").press("g")
    page.keyboard.press("j")
    page.wait_for_url(re.compile("/jobs"))
    page.keyboard.press("/")
    expect(page.locator("#q")).to_be_focused()
    page.goto(f"/jobs/{ended_job}")
    page.locator("#tab-overview").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-logs")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Tab")
    expect(page.locator("#log-name")).to_be_focused()


def test_administrator_creates_namespace_and_adds_member(
    open_page: OpenPage, sluice_server: RunningSluice
) -> None:
    name = f"vision-{time.monotonic_ns() % 10**6}"
    page = open_page("admin")
    page.goto("/new-namespace")
    page.fill("#id_name", name)
    page.fill("#id_partitions", "v100")
    page.fill("#id_max_gpus_per_job", "2")
    page.get_by_role("button", name="Create namespace").click()
    page.fill("#member-name", "bob")
    page.get_by_role("button", name="Add").click()
    expect(page.locator(".members")).to_contain_text("bob")
    job = submit(sluice_server, "on-the-v100", "hostname", "bob", namespace=name)
    wait_for(lambda: sluice_server.api("GET", f"jobs/{job}", "bob").json()["state"] == "COMPLETED")
    assert sluice_server.api("GET", f"jobs/{job}", "carol").status_code == 404
    outsider = open_page("carol")
    outsider.goto("/jobs?scope=all")
    expect(outsider.locator("main")).not_to_contain_text("on-the-v100")
    page.goto("/audit?about=settings")
    expect(page.locator("main")).to_contain_text(name)


def test_cluster_check_shows_its_results_on_the_page(open_page: OpenPage) -> None:
    page = open_page("admin")
    page.goto("/clusters/embedded")
    page.click("#check-button")
    expect(page.locator(".doctor li").first).to_be_visible(timeout=180_000)
    expect(page.locator("#check-button")).to_be_enabled(timeout=180_000)
