"""The submit page and templates in Chromium, on a real cluster."""

from __future__ import annotations

import json
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.accessibility import find_serious_violations, has_horizontal_scroll
from tests.browser.conftest import ConsoleErrors, OpenPage, sign_in
from tests.sluice_server import RunningSluice

pytestmark = [pytest.mark.browser, pytest.mark.cluster]
END_TIMEOUT_MS = 180_000
JOB_ADDRESS = re.compile(r"/jobs/[0-9a-f-]{36}$")

V1 = json.dumps(
    {
        "jobName": "from-v1",
        "image": "busybox",
        "virtualCluster": "default",
        "gpuType": "",
        "taskRoles": [
            {"name": "main", "taskNumber": 1, "cpuNumber": 1, "memoryMB": 500, "command": "date"},
            {"name": "side", "taskNumber": 2, "cpuNumber": 1, "memoryMB": 500, "command": "date"},
        ],
        "killAllOnCompletedTaskNumber": 1,
    }
)
V2 = """
protocolVersion: 2
name: from-v2
type: job
defaults: {virtualCluster: default}
prerequisites: [{type: dockerimage, name: img, uri: busybox}]
parameters: {word: hello}
taskRoles:
  main:
    instances: 1
    dockerImage: img
    resourcePerInstance: {cpu: 1, memoryMB: 500, gpu: 0}
    commands: ["echo <% $parameters.word %>"]
"""
MANIFEST = """
name: from-manifest
description: a manifest
version: "1.0"
gpus: 0
cpus: 1
memory: 1Gb
namespace: default
code_selector: storagePath
data_stores:
  - id: hostmount
    type: mount_volume
    training_data: {container: data}
    training_results: {container: result}
    training_workspace: {container: workspace}
    connection: {type: host_mount, name: host-mount, path: /tmp}
framework:
  name: busybox
  version: latest
  command: date
"""


def open_submit(page: Page, address: str = "/submit") -> None:
    page.goto(address)
    expect(status(page)).not_to_have_attribute("data-state", "busy")


def status(page: Page) -> Locator:
    return page.locator("[data-status]")


def wait_until_checked(page: Page) -> None:
    """Wait until the newest change was checked without problems."""
    expect(status(page)).to_have_attribute("data-state", re.compile("good|wait"))
    expect(page.locator("[data-problems]")).to_be_hidden()


def submit(page: Page) -> str:
    page.click("[data-submit]")
    page.locator("[data-confirm-submit]").get_by_role("button", name="Submit").click()
    page.wait_for_url(JOB_ADDRESS)
    return page.url.rsplit("/", 1)[1]


def replace_editor_text(page: Page, text: str) -> None:
    """Select all and type over it."""
    page.locator(".ace_editor").click(position={"x": 200, "y": 60})
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)


def editor_text(page: Page) -> str:
    expect(page.locator(".ace_content")).to_contain_text("jobName")
    text: str = page.evaluate("window.ace.edit(document.querySelector('.ace_editor')).getValue()")
    return text


def import_file(page: Page, name: str, text: str) -> None:
    page.set_input_files(
        "[data-import-file]",
        files=[{"name": name, "mimeType": "text/plain", "buffer": text.encode()}],
    )
    expect(page.locator("[data-import-bar]")).to_be_visible()


def role(page: Page, number: int) -> Locator:
    return page.locator("[data-role]").nth(number)


def test_default_job_is_submitted_and_completes(open_page: OpenPage) -> None:
    page = open_page("alice")
    page.goto("/jobs")
    page.get_by_role("link", name="Submit a job").first.click()
    expect(status(page)).to_have_attribute("data-state", re.compile("good|wait"))
    submit(page)
    expect(page.locator("#job-state")).to_have_attribute(
        "data-state", "COMPLETED", timeout=END_TIMEOUT_MS
    )


def test_distributed_job_is_edited_in_form_and_editor(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.fill("#f-jobName", "ps-and-workers")
    role(page, 0).locator("[data-path=command]").fill('echo "$TF_CONFIG"')
    page.click("[data-job-kind=distributed]")
    page.select_option("[data-preset]", "tensorflow/ps")
    expect(page.locator("[data-role]")).to_have_count(2)
    expect(role(page, 1).locator("[data-path=taskNumber]")).to_have_value("2")
    # A change in the form appears in the editor.
    role(page, 1).locator("[data-add-row=parameters]").click()
    page.keyboard.type("epochs")
    page.keyboard.press("Tab")
    page.keyboard.type("3")
    expect(role(page, 1).locator("[data-arguments]")).to_have_text("--epochs=3")
    page.click("[data-view=json]")
    wait_until_checked(page)
    document: dict[str, Any] = json.loads(editor_text(page))
    assert [one["name"] for one in document["taskRoles"]] == ["ps", "worker"]
    assert document["taskRoles"][1]["parameters"] == [{"key": "epochs", "value": "3"}]
    assert document["framework"] == {"name": "tensorflow", "strategy": "ps"}
    # A change in the editor appears in the form.
    document["taskRoles"][1]["taskNumber"] = 3
    document["taskRoles"][1]["minSucceededTaskCount"] = 3
    del document["taskRoles"][1]["parameters"]
    document["description"] = "changed as JSON"
    replace_editor_text(page, json.dumps(document, indent=2))
    wait_until_checked(page)
    page.click("[data-view=form]")
    expect(role(page, 1).locator("[data-path=taskNumber]")).to_have_value("3")
    expect(page.locator("#f-description")).to_have_value("changed as JSON")
    submit(page)
    expect(page.locator("#job-state")).to_have_attribute(
        "data-state", "COMPLETED", timeout=END_TIMEOUT_MS
    )
    expect(page.locator("#task-rows tr")).to_have_count(4)


def test_roles_are_added_copied_removed_and_restored(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.click("[data-job-kind=distributed]")
    page.click("[data-add-role]")
    role(page, 1).locator("[data-copy-role]").click()
    expect(page.locator("[data-role]")).to_have_count(3)
    names = [role(page, number).locator("[data-path=name]").input_value() for number in range(3)]
    assert len(set(names)) == 3
    page.click("[data-job-kind=single]")
    expect(page.locator("[data-role]")).to_have_count(1)
    page.click("[data-job-kind=distributed]")
    expect(page.locator("[data-role]")).to_have_count(3)
    role(page, 2).locator("[data-remove-role]").click()
    expect(page.locator("[data-role]")).to_have_count(2)
    wait_until_checked(page)


@pytest.mark.parametrize(
    ("name", "text", "job", "format_"),
    [
        ("v1.json", V1, "from-v1", "job file"),
        ("v2.yaml", V2, "from-v2", "OpenPAI v2"),
        ("manifest.yml", MANIFEST, "from-manifest", "FfDL"),
    ],
)
def test_every_dialect_can_be_imported(
    open_page: OpenPage, name: str, text: str, job: str, format_: str
) -> None:
    page = open_page("alice")
    open_submit(page)
    import_file(page, name, text)
    expect(page.locator("[data-import-bar] [data-title]")).to_contain_text(format_)
    expect(page.locator("#f-jobName")).to_have_value(job)
    page.click("[data-view=yaml]")
    wait_until_checked(page)
    assert f"jobName: {job}" in editor_text(page)


def test_imported_job_runs(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    import_file(page, "v2.yaml", V2)
    wait_until_checked(page)
    submit(page)
    expect(page.locator("#job-state")).to_have_attribute(
        "data-state", "COMPLETED", timeout=END_TIMEOUT_MS
    )


def test_dropped_file_is_imported(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    transfer = page.evaluate_handle(
        """(text) => { const data = new DataTransfer();
        data.items.add(new File([text], "dropped.json", {type: "application/json"})); return data; }""",
        V1,
    )
    page.dispatch_event("body", "dragenter", {"dataTransfer": transfer})
    expect(page.locator("[data-drop]")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    expect(page.locator("#f-jobName")).to_have_value("from-v1")
    expect(page.locator("[data-drop]")).to_be_hidden()


def test_invalid_file_is_shown_with_its_problems(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.set_input_files(
        "[data-import-file]",
        files=[
            {"name": "bad.json", "mimeType": "text/plain", "buffer": b'{"jobName": "a",\n"x" 1}'}
        ],
    )
    expect(page.locator(".ace_gutter-cell.ace_error")).to_have_count(1)
    expect(status(page)).to_have_attribute("data-state", "bad")
    expect(page.locator(".ace_content")).to_contain_text('"x" 1')


def test_problems_are_shown_at_their_fields(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.fill("#f-jobName", "no good!")
    role(page, 0).locator("[data-path=cpuNumber]").fill("4000")
    page.click("[data-submit]")
    name = page.locator("#f-jobName")
    expect(name).to_have_attribute("aria-invalid", "true")
    expect(name).to_be_focused()
    described = (name.get_attribute("aria-describedby") or "").split()
    expect(page.locator(f"#{described[-1]}")).to_contain_text("letters")
    expect(page.locator("[data-confirm-submit]")).to_be_hidden()
    page.fill("#f-jobName", "good")
    expect(page.locator("[data-problems]")).to_contain_text("CPUs")
    page.locator("[data-problems] button").first.click()
    expect(role(page, 0).locator("[data-path=cpuNumber]")).to_be_focused()
    role(page, 0).locator("[data-path=cpuNumber]").fill("1")
    wait_until_checked(page)
    expect(page.locator("[aria-invalid]")).to_have_count(0)


def visible_tips(page: Page) -> Locator:
    return page.locator(".field-tip-text:visible")


def test_every_field_has_a_tip_for_keyboard_mouse_and_touch(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    expect(visible_tips(page)).to_have_count(0)
    # By keyboard: the button follows the label, Escape hides the text.
    page.locator("#f-gpuType").focus()
    page.keyboard.press("Shift+Tab")
    expect(visible_tips(page)).to_contain_text("GPU type of every role")
    page.keyboard.press("Escape")
    expect(visible_tips(page)).to_have_count(0)
    # By mouse: the text stays while the pointer is on it.
    role(page, 0).get_by_role("button", name="About Memory").hover()
    expect(visible_tips(page)).to_contain_text("512 MB, 4 GB")
    visible_tips(page).hover()
    expect(visible_tips(page)).to_have_count(1)
    page.locator("h1").hover()
    expect(visible_tips(page)).to_have_count(0)
    # The rows of a list are explained with the list.
    role(page, 0).get_by_role("button", name="About Arguments").click()
    expect(visible_tips(page)).to_contain_text("Name of the argument")
    # Every visible label has a button.
    labels = page.locator("#job-form label.form-label:visible, #job-form legend:visible")
    buttons = page.locator("#job-form [data-tip]:visible")
    assert buttons.count() == labels.count()


def test_tip_stays_inside_a_narrow_window(open_page: OpenPage) -> None:
    page = open_page("alice", width=390, language="zh-hans")
    open_submit(page)
    for button in page.locator("#job-form [data-tip]:visible").all():
        button.focus()
        box = visible_tips(page).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    assert not has_horizontal_scroll(page)


def test_memory_gpu_type_version_and_open_job_in_the_form(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.fill("#f-jobName", "choices")
    page.fill("#f-image", "busybox")
    main = role(page, 0)
    main.locator("[data-path=memoryMB]").fill("much")
    expect(page.locator("[data-problems]")).to_contain_text("such as 4 GB")
    main.locator("[data-path=memoryMB]").fill("1.5 GB")
    main.locator("[data-path=shmMB]").fill("256 MB")
    main.locator("[data-path=gpuNumber]").fill("2")
    page.select_option("#f-gpuType", "a100")
    # One task has one GPU type: that of the job.
    expect(main.locator("[data-path=gpuType]")).to_be_hidden()
    main.get_by_role("button", name="Keep it open").click()
    expect(main.locator("[data-path=command]")).to_have_value("sleep infinity")
    wait_until_checked(page)
    expect(page.locator("[data-plan] [data-lines]")).to_contain_text("1.5 GB, 2 × a100")
    expect(page.locator("[data-plan] [data-cost]")).to_contain_text("GPU hours")
    # A strategy with one role can be chosen for one task, and its version if the cluster has one.
    page.select_option("[data-preset]", "paddle/collective")
    expect(page.locator("[data-version]")).to_be_disabled()
    expect(page.locator("[data-version-hint]")).to_contain_text("no image that states a version")
    page.click("[data-view=yaml]")
    text = editor_text(page)
    assert "memoryMB: 1536" in text
    assert "shmMB: 256" in text
    assert "gpuType: a100" in text
    page.click("[data-view=form]")
    expect(main.locator("[data-path=memoryMB]")).to_have_value("1536 MB")
    # The type of a size becomes that of the job.
    main.locator("[data-size]").select_option("cpu-small")
    expect(page.locator("#f-gpuType")).to_have_value("")
    expect(main.locator("[data-path=memoryMB]")).to_have_value("4 GB")


def test_framework_version_selects_the_image(
    open_page: OpenPage, sluice_server: RunningSluice
) -> None:
    sluice_server.manage(
        "shell",
        "-c",
        "from clusters.models import Cluster; c = Cluster.objects.get(); "
        "c.image_aliases['pytorch:2.3'] = 'busybox.sif'; c.save()",
    )
    page = open_page("alice")
    open_submit(page)
    page.fill("#f-jobName", "versioned")
    page.fill("#f-image", "python")
    role(page, 0).locator("[data-path=command]").fill("echo rank $RANK")
    page.select_option("[data-preset]", "pytorch/ddp")
    page.select_option("[data-version]", "2.3")
    expect(page.locator("#f-image")).to_have_value("")
    expect(page.locator("#f-image-hint")).to_have_text("Empty: the cluster's image of pytorch 2.3.")
    wait_until_checked(page)
    # An image of another version contradicts the choice; the problem is shown at the image.
    page.fill("#f-image", "pytorch:2.4")
    expect(page.locator("[data-problems]")).to_contain_text("framework.version is 2.3")
    page.fill("#f-image", "")
    wait_until_checked(page)
    job_id = submit(page)
    expect(page.locator("#job-state")).to_have_attribute(
        "data-state", "COMPLETED", timeout=END_TIMEOUT_MS
    )
    spec = sluice_server.api("GET", f"jobs/{job_id}/spec").json()
    assert (spec["image"], spec["framework"]["version"]) == ("pytorch:2.3", "2.3")


def test_editor_completes_fields_and_marks_lines(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.click("[data-view=yaml]")
    expect(page.locator(".ace_editor")).to_be_visible()
    replace_editor_text(
        page, "jobName: a\nimage: busybox\ntaskRoles:\n- name: main\n  comand: date\n"
    )
    expect(page.locator(".ace_gutter-cell.ace_error").first).to_be_visible()
    expect(page.locator("[data-problems]")).to_contain_text("command")
    page.keyboard.type("  cpuN")
    page.keyboard.press("Control+Space")
    expect(page.locator(".ace_autocomplete")).to_contain_text("cpuNumber")
    page.keyboard.press("Escape")


def test_draft_survives_reload_and_lost_session(
    open_page: OpenPage, sluice_server: RunningSluice, console_errors: ConsoleErrors
) -> None:
    console_errors.expected = ["401", "403"]  # the session is removed below
    page = open_page("bob")
    open_submit(page)
    page.fill("#f-jobName", "draft")
    role(page, 0).locator("[data-path=command]").fill("echo draft")
    wait_until_checked(page)
    page.reload()
    expect(page.locator("#f-jobName")).to_have_value("draft")
    expect(page.locator("[data-draft-bar]")).to_contain_text("restored")
    page.context.clear_cookies(name="sessionid")
    page.fill("#f-description", "typed after the session ended")
    expect(page.locator("[data-session-bar]")).to_be_visible()
    page.click("[data-sign-in]")
    sign_in(page, "bob", sluice_server.passwords["bob"])
    expect(page.locator("#f-jobName")).to_have_value("draft")
    expect(page.locator("#f-description")).to_have_value("typed after the session ended")
    page.click("[data-draft-other]")
    expect(page.locator("#f-description")).to_have_value("")
    expect(page.locator("[data-draft-bar]")).to_be_hidden()


def test_double_click_creates_one_job(open_page: OpenPage, sluice_server: RunningSluice) -> None:
    page = open_page("alice")
    open_submit(page)
    name = f"once-{int(time.time())}"
    page.fill("#f-jobName", name)
    role(page, 0).locator("[data-path=command]").fill("true")
    wait_until_checked(page)
    page.click("[data-submit]")
    page.locator("[data-confirm-submit] [data-yes]").dblclick()
    page.wait_for_url(JOB_ADDRESS)
    found = sluice_server.api("GET", f"jobs?q={name}").json()["items"]
    assert len(found) == 1
    # A changed copy records the job it was cloned from.
    page.goto(f"/submit?clone={found[0]['id']}")
    page.fill("#f-jobName", f"{name}-copy")
    wait_until_checked(page)
    submit(page)
    copy = sluice_server.api("GET", f"jobs?name={name}-copy").json()["items"][0]
    assert copy["cloned_from"] == found[0]["id"]


def test_job_is_saved_as_template_and_submitted_with_parameters(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.fill("#f-jobName", "to-keep")
    role(page, 0).locator("[data-path=command]").fill("echo first")
    wait_until_checked(page)
    submit(page)
    page.get_by_role("link", name="Save as template").click()
    expect(page.locator("#t-name")).to_have_value("to-keep")
    expect(page.locator(".ace_editor")).to_be_visible()
    page.click("[data-add-parameter]")
    page.keyboard.type("word")
    replace_editor_text(
        page,
        editor_text(page)
        .replace("echo first", "echo <% $parameters.word %>")
        .replace("jobName: to-keep", "jobName: from-template"),
    )
    expect(page.locator("[data-check-status]")).to_have_text("The job file is valid.")
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#toasts")).to_contain_text("saved")
    page.get_by_role("link", name="Use").click()
    page.fill("#p-word", "second")
    page.get_by_role("button", name="Open in the form").click()
    expect(role(page, 0).locator("[data-path=command]")).to_have_value("echo second")
    wait_until_checked(page)
    submit(page)
    expect(page.locator("h1")).to_have_text("from-template")
    expect(page.locator("#job-state")).to_have_attribute(
        "data-state", "COMPLETED", timeout=END_TIMEOUT_MS
    )
    page.goto("/templates?q=to-keep")
    page.check("[data-select-all]")
    page.click("#template-batch button")
    page.locator("#confirm-dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#toasts")).to_contain_text("deleted")


def test_submit_page_saves_a_template(open_page: OpenPage) -> None:
    page = open_page("alice")
    open_submit(page)
    page.click("[data-save-template]")
    page.fill("#template-name", "<script>alert(1)</script>")
    page.locator("[data-template-dialog] [data-yes]").click()
    page.wait_for_url(re.compile(r"/templates/[0-9a-f-]{36}$"))
    expect(page.locator("h1")).to_have_text("<script>alert(1)</script>")


def test_code_is_uploaded_and_runs(open_page: OpenPage, tmp_path: Path) -> None:
    archive = tmp_path / "code.zip"
    with zipfile.ZipFile(archive, "w") as created:
        created.writestr("run.sh", "echo from the archive\n")
    page = open_page("alice")
    open_submit(page)
    page.fill("#f-jobName", "with-code")
    role(page, 0).locator("[data-path=command]").fill('sh "$PAI_CODE_DIR/run.sh"')
    page.select_option("[data-code-source]", "upload")
    page.set_input_files("[data-upload]", archive)
    expect(page.locator("[data-upload-status]")).to_contain_text("uploaded")
    wait_until_checked(page)
    submit(page)
    expect(page.locator("#job-state")).to_have_attribute(
        "data-state", "COMPLETED", timeout=END_TIMEOUT_MS
    )


def test_submit_page_can_be_used_by_keyboard(open_page: OpenPage) -> None:
    page = open_page("alice")
    page.goto("/jobs")
    page.keyboard.press("n")
    page.wait_for_url("**/submit")
    wait_until_checked(page)
    page.click("[data-view=yaml]")
    expect(page.locator(".ace_editor")).to_be_visible()
    page.focus(".ace_scroller")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    inside = page.evaluate("Boolean(document.activeElement.closest('.ace_editor .ace_text-input'))")
    assert not inside, "Escape and Tab did not leave the editor"
    page.locator("[data-submit]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-confirm-submit]")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("[data-confirm-submit]")).to_be_hidden()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_fit_the_width_and_are_accessible(
    open_page: OpenPage, sluice_server: RunningSluice, width: int, theme: str
) -> None:
    created = sluice_server.api(
        "POST",
        "templates",
        json={
            "name": f"shown {'long ' * 20}",
            "spec": {
                "jobName": "x",
                "image": "",
                "taskRoles": [{"name": "main", "command": "date"}],
            },
            "parameters": [{"name": "n", "kind": "whole", "default": 1}],
        },
    )
    assert created.status_code == 201, created.text
    template = created.json()["id"]
    language = "zh-hans" if width == 390 else "en"
    page = open_page("alice", width=width, theme=theme, language=language)

    def check_layout(where: str) -> None:
        page.wait_for_timeout(300)
        assert not has_horizontal_scroll(page), where
        assert not find_serious_violations(page, theme), where

    open_submit(page)
    check_layout("submit, basic")
    page.check("[data-professional]")
    page.click("[data-job-kind=distributed]")
    page.select_option("[data-preset]", "mxnet/ps")
    for name in ("parameters", "portList"):
        role(page, 0).locator(f"[data-add-row={name}]").click()
    page.click("[data-add-row=mounts]")
    page.click("[data-add-pair=jobEnvs]")
    page.fill("#f-jobName", "not good!")
    page.locator("#f-jobName").blur()
    expect(page.locator("#f-jobName")).to_have_attribute("aria-invalid", "true")
    check_layout("submit, professional, with problems")
    page.click("[data-view=yaml]")
    expect(page.locator(".ace_editor")).to_be_visible()
    check_layout("submit, editor")
    for address in (
        "/templates",
        "/templates/new",
        f"/templates/{template}",
        f"/templates/{template}/use",
    ):
        page.goto(address)
        check_layout(address)
    sluice_server.api("DELETE", f"templates/{template}")
