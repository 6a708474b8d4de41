"""Parsing of job file text: JSON and YAML, their special cases, and hostile input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.jobfile import SpecError, parse
from jobs.jobfile.errors import Position
from jobs.jobfile.limits import MAX_FILE_BYTES, MAX_VALUES
from jobs.jobfile.parse import parse_text


def parse_problem(text: str | bytes, filename: str = "") -> tuple[str, int | None, str]:
    """Code, line and message of the problem."""
    with pytest.raises(SpecError) as caught:
        parse_text(text, filename=filename)
    (problem,) = caught.value.problems
    return problem.code, problem.line, problem.message


def test_json_may_have_comments_and_trailing_commas():
    parsed = parse_text('{\n  // note\n  "a": "http://x", /* more */\n  "b": [1, {"c": 2.5},],\n}')
    assert parsed.document == {"a": "http://x", "b": [1, {"c": 2.5}]}
    assert parsed.positions["a",] == Position(3, 3)
    assert parsed.positions["b", 1, "c"] == Position(4, 13)
    assert [warning.line for warning in parsed.warnings] == [2, 4]
    assert "comments" in parsed.warnings[0].message


def test_yaml_scalars_follow_yaml_1_2():
    parsed = parse_text(
        "a: yes\nb: on\nc: 012\nd: 0o17\ne: 0x1F\nf: 1:30\ng: 2024-01-31\nh: 1e3\ni: ~\nj: 'true'\nk: TRUE\nl: 1_000\n"
    )
    assert parsed.document == {
        "a": "yes",
        "b": "on",
        "c": 12,
        "d": 15,
        "e": 31,
        "f": "1:30",
        "g": "2024-01-31",
        "h": 1000.0,
        "i": None,
        "j": "true",
        "k": True,
        "l": "1_000",
    }


def test_yaml_aliases_and_merge_keys_are_resolved():
    parsed = parse_text("base: &b {x: 1, y: 2}\nrole:\n  <<: *b\n  y: 3\nagain: *b\n")
    assert parsed.document["role"] == {"x": 1, "y": 3}
    assert parsed.document["again"] == {"x": 1, "y": 2}
    assert parsed.positions["role", "y"] == Position(4, 3)


def test_file_extension_selects_json_or_flow_yaml():
    assert parse_text("{a: 1}", filename="x.yaml").document == {"a": 1}
    assert parse_text('{"a": 1}', filename="x.yml").document == {"a": 1}
    assert parse_text("a: 1", filename="x.json").format == "yaml"


def test_bytes_with_a_byte_order_mark_are_decoded():
    assert parse_text(b'\xef\xbb\xbf{"a": "\xe4\xb8\xad"}').document == {"a": "中"}


@pytest.mark.parametrize(
    ("text", "code", "line", "expected_text"),
    [
        ("", "empty", None, "empty"),
        (" \n\t", "empty", None, "empty"),
        (b"a: \xff", "not_utf8", 1, "UTF-8"),
        ("a" * (MAX_FILE_BYTES + 1), "file_too_large", None, "1,048,577 bytes"),
        ("[" * 100_000, "too_deep", 1, "50 levels"),
        ('{"a":' * 50_000, "too_deep", 1, "50 levels"),
        ("- " * 100_000, "too_deep", 1, "50 levels"),
        ("a: " + "[" * 100_000, "too_deep", 1, "50 levels"),
        ("a: 1\nb: 2\na: 3", "duplicate_key", 3, "again in line 3"),
        ('{"a": 1,\n"a": 2}', "duplicate_key", 2, "again in line 2"),
        ("a:\n\tb: 1", "yaml_tab", 2, "indented by a tab"),
        ("a: 1\n---\nb: 2", "many_documents", 2, "several YAML documents"),
        ("1: x", "key_type", 1, "put quotes"),
        ("true: x", "key_type", 1, "put quotes"),
        ("? [a]\n: x", "key_type", 1, "put quotes"),
        ("a: !!python/object/apply:os.system [id]", "tag", 1, "not supported"),
        ("a: !thing x", "tag", 1, "not supported"),
        ("a: &x\n  b: *x", "recursive_alias", 2, "itself"),
        ("a: *x", "unknown_alias", 1, "no earlier"),
        ("a: .inf", "not_finite", 1, "finite"),
        ("a: \x00", "yaml", 1, "control characters"),
        ('a: "\\0"', "nul", 1, "NUL"),
        ('{"a": "\\u0000"}', "nul", 1, "NUL"),
        ('{"a": "\\ud800"}', "nul", 1, "half of a Unicode surrogate pair"),
        ('{"a": NaN}', "json", 1, '"NaN" must be in double quotes'),
        ('{"a": 1' + "0" * 5000 + "}", "too_large", 1, "too many digits"),
        ("a: 1" + "0" * 5000, "too_large", 1, "too many digits"),
        ("{'a': 1}", "json", 1, "double quotes"),
        ("{\"a\": 'x'}", "json", 1, "not single quotes"),
        ('{"a": "x\ny"}', "json", 1, "no closing quote"),
        ('{"a" 1}', "json", 1, "a colon must follow"),
        ('{"a": 1 "b": 2}', "json", 1, "a comma or } must follow"),
        ('{"a": 1', "json", 1, "a comma or } must follow"),
        ('{"a": 1} x', "json", 1, "after the end"),
        ('{"a": "\\x"}', "json", 1, "backslash"),
        ("a: b: c", "yaml", 1, "not valid YAML"),
        ("a: [1, 2", "yaml", 2, "not valid YAML"),
    ],
)
def test_invalid_text_is_rejected_with_code_and_line(
    text: str | bytes, code: str, line: int | None, expected_text: str
):
    found = parse_problem(text)
    assert found[:2] == (code, line)
    assert expected_text in found[2]


def test_deep_aliases_count_as_depth():
    text = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 80))
    assert parse_problem(text)[0] == "too_deep"


class EventCounter:
    """Counts the parser events that the document builder has read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        builder = parse._DocumentBuilder
        monkeypatch.setattr(
            parse,
            "_DocumentBuilder",
            lambda events, *, is_json: builder(self._counted(events), is_json=is_json),
        )

    def _counted(self, events: Iterator[Any]) -> Iterator[Any]:
        for event in events:
            self.count += 1
            yield event


@pytest.mark.parametrize(
    ("text", "code", "max_events"),
    [
        ("[" * 100_000, "too_deep", 100),
        ("- " * 100_000, "too_deep", 100),
        ('{"a":' * 50_000, "too_deep", 200),
        ("[" + ",".join(["1"] * 100_000) + "]", "too_many_values", MAX_VALUES + 10),
        ("\n".join(f"k{i}: v" for i in range(50_000)), "too_many_values", 2 * MAX_VALUES + 10),
        ("a" * (MAX_FILE_BYTES + 1), "file_too_large", 0),
    ],
    ids=["JSON depth", "YAML depth", "JSON object depth", "JSON width", "YAML width", "size"],
)
def test_parsing_stops_at_the_limits(
    monkeypatch: pytest.MonkeyPatch, text: str, code: str, max_events: int
):
    counter = EventCounter(monkeypatch)
    assert parse_problem(text)[0] == code
    assert counter.count <= max_events


def test_alias_bomb_is_rejected_without_expansion(monkeypatch: pytest.MonkeyPatch):
    counter = EventCounter(monkeypatch)
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
    )
    assert parse_problem(bomb)[0] == "too_many_values"
    assert counter.count < 200
