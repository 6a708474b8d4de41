"""Every message of the client has a Chinese translation with the same placeholders; no translation is unused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sluice import messages
from sluice.chinese import CHINESE

SOURCE = Path(__file__).resolve().parents[3] / "client" / "src" / "sluice"
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def collect_messages() -> dict[str, str]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "t":
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}"
                found[node.args[0].value] = f"{path.name}:{node.lineno}"
    return found


def test_every_message_is_translated_and_no_translation_is_unused() -> None:
    used = collect_messages()
    assert len(used) > 150
    assert {text: location for text, location in used.items() if text not in CHINESE} == {}
    assert set(CHINESE) - set(used) == set()


def test_translations_have_the_same_placeholders() -> None:
    for english, chinese in CHINESE.items():
        assert set(PLACEHOLDER.findall(english)) == set(PLACEHOLDER.findall(chinese)), english


@pytest.mark.parametrize(
    ("variables", "language"),
    [
        ({"LANG": "zh_CN.UTF-8"}, "zh-hans"),
        ({"LANG": "en_US.UTF-8"}, "en"),
        ({"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ({"LC_MESSAGES": "zh_TW", "LANG": "en"}, "zh-hans"),
        ({}, "en"),
    ],
)
def test_language_follows_environment(
    variables: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    messages.language.cache_clear()
    try:
        assert messages.language() == language
        text = messages.t("Template {word} does not exist.", word="x")
        assert text == (
            "模板 x 不存在。" if language == "zh-hans" else "Template x does not exist."
        )
    finally:
        messages.language.cache_clear()
