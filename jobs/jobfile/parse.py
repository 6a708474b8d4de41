"""From the bytes of a job file to plain values, with the line of every one of them.

JSON (comments and trailing commas forgiven, with a warning) and YAML, both within limits that make
hostile input cheap to refuse. YAML scalars follow YAML 1.2: `yes` and `on` are text, 012 is twelve,
1:30 is text. Knows nothing of what the values mean. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from core.messages import Sentence, _
from jobs.jobfile.errors import Loc, Position, Problem, SpecError, Warning, path_text, shorten

MAX_FILE_BYTES = 1024 * 1024
MAX_DEPTH = 50
MAX_NODES = 20_000  # after aliases are followed
MAX_DIGITS = 300

_UNFIT = re.compile("[\x00\ud800-\udfff]")


@dataclass(slots=True)
class Parsed:
    """A document, and where each of its values stands."""

    document: Any
    positions: dict[Loc, Position]
    format: str  # "json" or "yaml"
    warnings: list[Warning] = field(default_factory=list)


def parse_text(text: str | bytes, *, filename: str = "") -> Parsed:
    """Reads a file as JSON or YAML, whichever it is. Raises SpecError."""
    decoded = _decode(text)
    if not decoded.strip():
        raise SpecError.single("", _("is empty."), code="empty")
    is_yaml = filename.lower().endswith((".yaml", ".yml"))
    looks_like_json = decoded.lstrip().startswith(("{", "[", "//", "/*"))
    if looks_like_json and not is_yaml:
        return _Json(decoded).parse()
    return _Yaml(decoded).parse()


def _decode(given: str | bytes) -> str:
    data = given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass")
    if len(data) > MAX_FILE_BYTES:
        raise SpecError.single(
            "",
            _(
                "has %(count)s bytes; a job file may have %(limit)s.",
                count=f"{len(data):,}",
                limit=f"{MAX_FILE_BYTES:,}",
            ),
            code="file_too_large",
        )
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SpecError.single(
            "", _("is not UTF-8 text; save it as UTF-8."), code="not_utf8", line=line
        ) from error


def _refuse(loc: Loc, at: Position, code: str, message: Sentence, value: object = "") -> NoReturn:
    raise SpecError(
        [Problem(path_text(loc), message, code=code, value=shorten(value)).at(at)]
    ) from None


def _check_text(text: str, loc: Loc, at: Position) -> str:
    if found := _UNFIT.search(text):
        message = _("must not hold half a Unicode character.")
        if found.group() == "\x00":
            message = _("must not hold a NUL character.")
        _refuse(loc, at, "nul", message, text)
    return text


# JSON

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_$][\w$-]*")
_WORDS = {"true": True, "false": False, "null": None}


class _Json:
    """A JSON reader that remembers positions, which the standard one cannot."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.positions: dict[Loc, Position] = {}
        self.comment: Position | None = None
        self.trailing_comma: Position | None = None
        self.line_starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self._line = 0
        self.nodes = 0

    def parse(self) -> Parsed:
        self._skip()
        document = self._value((), 0)
        self._skip()
        if self.at < len(self.text):
            self._fail(_("there is more text after the end of the job"), ())
        parsed = Parsed(document, self.positions, "json")
        if self.comment:
            parsed.warnings.append(
                Warning(
                    "",
                    _("holds comments, which JSON does not know; they are ignored."),
                    self.comment.line,
                )
            )
        if self.trailing_comma:
            parsed.warnings.append(
                Warning(
                    "",
                    _("holds a comma before a closing bracket; it is ignored."),
                    self.trailing_comma.line,
                )
            )
        return parsed

    def _here(self) -> Position:
        starts = (
            self.line_starts
        )  # reading only goes forward, so the line is found from the last one
        while self._line + 1 < len(starts) and starts[self._line + 1] <= self.at:
            self._line += 1
        return Position(self._line + 1, self.at - starts[self._line] + 1)

    def _fail(self, what: Sentence, loc: Loc) -> NoReturn:
        at = self._here()
        _refuse(
            loc,
            at,
            "json",
            _(
                "is not valid JSON: %(what)s (line %(line)s, column %(column)s).",
                what=what,
                line=at.line,
                column=at.column,
            ),
        )

    def _skip(self) -> None:
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if not self.text.startswith("/", self.at):
                return
            found = _COMMENT.match(self.text, self.at)
            if not found:
                return
            self.comment = self.comment or self._here()
            self.at = found.end()

    def _value(self, loc: Loc, depth: int) -> Any:
        self.nodes += 1
        here = self._here()
        self.positions.setdefault(loc, here)
        if depth > MAX_DEPTH:
            _refuse(
                (),
                here,
                "too_deep",
                _("is nested deeper than %(limit)s levels.", limit=MAX_DEPTH),
            )
        if self.nodes > MAX_NODES:
            _refuse(
                (),
                here,
                "too_many_values",
                _("holds more than %(limit)s values.", limit=f"{MAX_NODES:,}"),
            )
        start = self.text[self.at : self.at + 1]
        if start == "{":
            return self._object(loc, depth)
        if start == "[":
            return self._array(loc, depth)
        if start == '"':
            return self._string(loc)
        return self._scalar(loc)

    def _scalar(self, loc: Loc) -> Any:
        if found := _NUMBER.match(self.text, self.at):
            digits = found.group()
            if len(digits) > MAX_DIGITS:
                _refuse(loc, self._here(), "too_large", _("is too long a number."), digits)
            self.at = found.end()
            return int(digits) if re.fullmatch("-?[0-9]+", digits) else float(digits)
        word = _WORD.match(self.text, self.at)
        if word and word.group() in _WORDS:
            self.at = word.end()
            return _WORDS[word.group()]
        if word:
            self._fail(_('"%(word)s" must stand in double quotes', word=shorten(word.group())), loc)
        if self.text.startswith("'", self.at):
            self._fail(_("text must stand in double quotes, not single ones"), loc)
        self._fail(_("a value is missing here"), loc)

    def _string(self, loc: Loc) -> str:
        found = _STRING.match(self.text, self.at)
        if not found:
            end = re.compile(r'[^"\n]*').match(self.text, self.at + 1)
            self.at = end.end() if end else self.at
            self._fail(
                _("text has no closing quote on its line, or holds a control character"), loc
            )
        try:
            value = json.loads(found.group())
        except ValueError:
            self._fail(_("text holds an unknown backslash escape"), loc)
        _check_text(value, loc, self._here())
        self.at = found.end()
        return str(value)

    def _object(self, loc: Loc, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self.at += 1
        self._skip()
        while not self.text.startswith("}", self.at):
            here = self._here()
            if not self.text.startswith('"', self.at):
                self._fail(_("a field name in double quotes, or }, must follow"), loc)
            key = self._string(loc)
            if key in result:
                _refuse(
                    (*loc, key),
                    here,
                    "duplicate_key",
                    _("stands twice (again in line %(line)s).", line=here.line),
                )
            self.positions[(*loc, key)] = here
            self._skip()
            if not self.text.startswith(":", self.at):
                self._fail(_('a colon must follow "%(key)s"', key=shorten(key)), loc)
            self.at += 1
            self._skip()
            result[key] = self._value((*loc, key), depth + 1)
            self._comma("}", loc)
        self.at += 1
        return result

    def _array(self, loc: Loc, depth: int) -> list[Any]:
        result: list[Any] = []
        self.at += 1
        self._skip()
        while not self.text.startswith("]", self.at):
            result.append(self._value((*loc, len(result)), depth + 1))
            self._comma("]", loc)
        self.at += 1
        return result

    def _comma(self, closing: str, loc: Loc) -> None:
        self._skip()
        if self.text.startswith(",", self.at):
            comma = self._here()
            self.at += 1
            self._skip()
            if self.text.startswith(closing, self.at):
                self.trailing_comma = self.trailing_comma or comma
        elif not self.text.startswith(closing, self.at):
            self._fail(_("a comma or %(closing)s must follow", closing=closing), loc)


# YAML

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster

NULL_TEXTS = ("", "~", "null", "Null", "NULL")
BOOL_TEXTS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
YAML_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
YAML_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
YAML_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TAGS = {
    f"tag:yaml.org,2002:{name}": name
    for name in ("str", "int", "float", "bool", "null", "map", "seq")
}


@dataclass(slots=True)
class _Anchor:
    value: Any = None
    nodes: int = 0
    depth: int = 0
    done: bool = False


class _Yaml:
    """Builds values from libyaml's events, within limits, without PyYAML's constructors."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.positions: dict[Loc, Position] = {}
        self.anchors: dict[str, _Anchor] = {}
        self.nodes = 0
        self.deepest = 0

    def parse(self) -> Parsed:
        try:
            events = iter(yaml.parse(self.text, Loader=_PARSER))
            document = self._document(events)
        except yaml.YAMLError as error:
            raise SpecError([_yaml_problem(error, self.text)]) from error
        return Parsed(document, self.positions, "yaml")

    def _document(self, events: Iterator[Any]) -> Any:
        document: Any = None
        seen = False
        for event in events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if seen:
                _refuse(
                    (), _mark(event), "many_documents", _("holds several YAML documents; give one.")
                )
            seen = True
            document = self._node(next(events), events, (), 0)
        return document

    def _node(self, event: Any, events: Iterator[Any], loc: Loc, depth: int) -> Any:
        at = _mark(event)
        self.positions.setdefault(loc, at)
        self._count(1, depth, at)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, loc, depth, at)
        anchor = _Anchor()
        if event.anchor:
            self.anchors[event.anchor] = anchor
        before, deepest_before = self.nodes, self.deepest
        self.deepest = depth
        if isinstance(event, yaml.MappingStartEvent):
            self._tag(event, loc, at, "map")
            value: Any = self._mapping(events, loc, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._tag(event, loc, at, "seq")
            value = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                value.append(self._node(event, events, (*loc, len(value)), depth + 1))
        else:
            value = self._scalar(event, loc, at)
        anchor.value, anchor.nodes, anchor.done = value, self.nodes - before + 1, True
        anchor.depth = self.deepest - depth
        self.deepest = max(self.deepest, deepest_before)
        return value

    def _count(self, nodes: int, depth: int, at: Position) -> None:
        self.nodes += nodes
        self.deepest = max(self.deepest, depth)
        if depth > MAX_DEPTH:
            _refuse(
                (),
                at,
                "too_deep",
                _("is nested deeper than %(limit)s levels.", limit=MAX_DEPTH),
            )
        if self.nodes > MAX_NODES:
            _refuse(
                (),
                at,
                "too_many_values",
                _(
                    "holds more than %(limit)s values, aliases followed.",
                    limit=f"{MAX_NODES:,}",
                ),
            )

    def _alias(self, event: Any, loc: Loc, depth: int, at: Position) -> Any:
        anchor = self.anchors.get(event.anchor)
        if anchor is None:
            _refuse(
                loc,
                at,
                "unknown_alias",
                _("*%(anchor)s refers to no earlier &%(anchor)s.", anchor=event.anchor),
            )
        if not anchor.done:
            _refuse(
                loc,
                at,
                "recursive_alias",
                _("*%(anchor)s stands inside of &%(anchor)s itself.", anchor=event.anchor),
            )
        self._count(anchor.nodes, depth + anchor.depth, at)
        return anchor.value

    def _mapping(self, events: Iterator[Any], loc: Loc, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            at = _mark(event)
            is_merge = (
                isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style
            )
            key = "<<" if is_merge else self._node(event, events, (*loc, ""), depth + 1)
            if not isinstance(key, str):
                _refuse(
                    loc,
                    at,
                    "key_type",
                    _(
                        "has the key %(key)s, which is no text; put quotes around it.",
                        key=shorten(key),
                    ),
                )
            if key in result:
                _refuse(
                    (*loc, key),
                    at,
                    "duplicate_key",
                    _("stands twice (again in line %(line)s).", line=at.line),
                )
            self.positions[(*loc, key)] = at
            value = self._node(next(events), events, (*loc, key), depth + 1)
            if is_merge:
                self._merge(merged, value, loc, at)
            else:
                result[key] = value
        return {**merged, **result} if merged else result

    @staticmethod
    def _merge(merged: dict[str, Any], value: Any, loc: Loc, at: Position) -> None:
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, dict):
                _refuse(
                    loc, at, "merge", _("<< must be followed by a mapping or a list of mappings.")
                )
            for key, one in part.items():
                merged.setdefault(key, one)

    @staticmethod
    def _tag(event: Any, loc: Loc, at: Position, expected: str) -> None:
        if event.tag not in (None, "!", f"tag:yaml.org,2002:{expected}"):
            _refuse(
                loc,
                at,
                "tag",
                _(
                    "carries the YAML tag %(tag)s, which has no meaning here.",
                    tag=shorten(event.tag),
                ),
            )

    def _scalar(self, event: Any, loc: Loc, at: Position) -> Any:
        text = _check_text(event.value, loc, at)
        if event.tag not in (None, "!"):
            kind = _TAGS.get(event.tag)
            if kind in (None, "map", "seq"):
                _refuse(
                    loc,
                    at,
                    "tag",
                    _(
                        "carries the YAML tag %(tag)s, which has no meaning here.",
                        tag=shorten(event.tag),
                    ),
                )
            if kind == "str":
                return text
            return _plain(text, loc, at)
        return _plain(text, loc, at) if event.implicit[0] and not event.style else text


def _plain(text: str, loc: Loc, at: Position) -> Any:
    """An unquoted scalar by YAML 1.2's core rules."""
    if text in NULL_TEXTS:
        return None
    if text in BOOL_TEXTS:
        return BOOL_TEXTS[text]
    if text[0] not in "+-.0123456789":
        return text
    if len(text) > MAX_DIGITS:
        if YAML_FLOAT.fullmatch(text):
            _refuse(loc, at, "too_large", _("is too long a number."), text)
        return text
    if YAML_INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if YAML_FLOAT.fullmatch(text):
        return float(text)
    if YAML_SPECIAL.fullmatch(text):
        _refuse(
            loc,
            at,
            "not_finite",
            _("must be a finite number; put quotes around it if it is text."),
            text,
        )
    return text


def _mark(event: Any) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


# What libyaml 0.2 and PyYAML 6.0 say most often; the rest of their words are shown as they are.
_YAML_WORDS: Mapping[str, Sentence] = {
    str(words): words
    for words in (
        _("mapping values are not allowed in this context"),
        _("mapping values are not allowed here"),
        _("mapping keys are not allowed in this context"),
        _("block sequence entries are not allowed in this context"),
        _("sequence entries are not allowed here"),
        _("could not find expected ':'"),
        _("did not find expected key"),
        _("did not find expected node content"),
        _("did not find expected <document start>"),
        _("did not find expected '-' indicator"),
        _("did not find expected ',' or ']'"),
        _("did not find expected ',' or '}'"),
        _("did not find expected alphabetic or numeric character"),
        _("did not find URI escaped octet"),
        _("found character that cannot start any token"),
        _("found a tab character that violates indentation"),
        _("found a tab character where an indentation space is expected"),
        _("found unexpected end of stream"),
        _("found unexpected document indicator"),
        _("found unexpected ':'"),
        _("found unknown escape character"),
        _("found undefined tag handle"),
        _("control characters are not allowed"),
        _("while parsing a node"),
        _("while parsing a block node"),
        _("while parsing a flow node"),
        _("while parsing a block mapping"),
        _("while parsing a block collection"),
        _("while parsing a flow mapping"),
        _("while parsing a flow sequence"),
        _("while scanning a simple key"),
        _("while scanning a plain scalar"),
        _("while scanning a quoted scalar"),
        _("while scanning a block scalar"),
        _("while scanning for the next token"),
        _("while scanning an anchor"),
        _("while scanning an alias"),
        _("while scanning a tag"),
        _("while parsing a quoted scalar"),
    )
}


def _yaml_problem(error: yaml.YAMLError, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        reason = str(getattr(error, "reason", "") or error).splitlines()[0]
        at = getattr(error, "position", None)
        line = text.count("\n", 0, at) + 1 if isinstance(at, int) and at >= 0 else None
        return Problem(
            "", _("is not valid YAML: %(reason)s.", reason=shorten(reason)), code="yaml", line=line
        )
    line = mark.line + 1
    lines = text.splitlines()
    written = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in written[: len(written) - len(written.lstrip())]:
        return Problem(
            "",
            _("is not valid YAML: line %(line)s is indented by a tab; use spaces.", line=line),
            "yaml_tab",
            line=line,
        )
    words = getattr(error, "problem", None)
    reason = _YAML_WORDS.get(words, words) if words else _("it cannot be read")
    if context := getattr(error, "context", None):
        reason = _("%(words)s %(context)s", words=reason, context=_YAML_WORDS.get(context, context))
    message = _(
        "is not valid YAML: %(reason)s (line %(line)s, column %(column)s).",
        reason=reason,
        line=line,
        column=mark.column + 1,
    )
    return Problem(
        "", message, code="yaml", value=shorten(written.strip()), line=line, column=mark.column + 1
    )
