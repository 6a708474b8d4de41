"""Parses the bytes of a job file, JSON or YAML, to plain values with the line and column of each.

Comments and trailing commas in JSON are ignored with a warning. Files above the limits (`limits`) are refused; those of
depth, number of values and text stop the parser, so that aliases cannot multiply them. YAML scalars follow YAML 1.2: `yes` and `on` are text, 012 is twelve, 1:30 is text. Does
not know the fields of job files. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from core.cancellation import checkpoint
from core.messages import Message, _
from jobs.jobfile.errors import (
    Loc,
    Position,
    Problem,
    SpecError,
    SpecWarning,
    raise_problem,
    shorten,
)
from jobs.jobfile.json_events import JsonEvents
from jobs.jobfile.limits import (
    MAX_FILE_BYTES,
    MAX_NESTING_DEPTH,
    MAX_NUMBER_DIGITS,
    MAX_TOTAL_CHARS,
    MAX_VALUES,
    MAX_YAML_DIRECTIVES,
    check_document,
    refuse_too_deep,
    refuse_too_many_values,
    refuse_too_much_text,
)

_FORBIDDEN_CHARACTER = re.compile("[\x00\ud800-\udfff]")


@dataclass(slots=True)
class ParsedFile:
    """The values of a file (`document`) with the position of each."""

    document: Any
    positions: dict[Loc, Position]
    format: str  # "json" or "yaml"
    warnings: list[SpecWarning] = field(default_factory=list)


def parse_text(text: str | bytes, *, filename: str = "") -> ParsedFile:
    """Parse the text of a file as JSON or YAML. Raises SpecError.

    Text that begins like JSON is parsed as JSON, unless the file name ends in .yaml or .yml.
    """
    decoded = _decode(text)
    if not decoded.strip():
        raise SpecError.single("", _("is empty."), code="empty")
    is_yaml = filename.lower().endswith((".yaml", ".yml"))
    looks_like_json = decoded.lstrip().startswith(("{", "[", "//", "/*"))
    parsed = _parse_json(decoded) if looks_like_json and not is_yaml else _parse_yaml(decoded)
    check_document(parsed.document, parsed.positions)
    return parsed


def _parse_json(text: str) -> ParsedFile:
    events = JsonEvents(text)
    builder = _DocumentBuilder(iter(events), is_json=True)
    document = builder.build_document()
    return ParsedFile(document, builder.positions, "json", events.list_warnings())


def _parse_yaml(text: str) -> ParsedFile:
    if len(_YAML_DIRECTIVE.findall(text)) > MAX_YAML_DIRECTIVES:
        raise SpecError.single(
            "",
            _(
                "has more than %(limit)s lines that begin with %% (YAML directives); remove them.",
                limit=MAX_YAML_DIRECTIVES,
            ),
            code="too_many_directives",
        )
    try:
        builder = _DocumentBuilder(iter(yaml.parse(text, Loader=_YAML_LOADER)), is_json=False)
        document = builder.build_document()
    except yaml.YAMLError as error:
        raise SpecError([_build_yaml_problem(error, text)]) from error
    return ParsedFile(document, builder.positions, "yaml")


def _decode(source: str | bytes) -> str:
    data = source if isinstance(source, bytes) else source.encode("utf-8", "surrogatepass")
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


def _check_text(text: str, loc: Loc, position: Position) -> str:
    if match := _FORBIDDEN_CHARACTER.search(text):
        message = _("must not contain half of a Unicode surrogate pair.")
        if match.group() == "\x00":
            message = _("must not contain a NUL character.")
        raise_problem(loc, position, "nul", message, text)
    return text


# CSafeLoader uses libyaml, whose parser is ten times faster than PyYAML's own.
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_YAML_NULL_TEXTS = ("", "~", "null", "Null", "NULL")
_YAML_BOOL_TEXTS = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
YAML_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
YAML_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_YAML_INF_OR_NAN = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_YAML_DIRECTIVE = re.compile("^%", re.MULTILINE)
_YAML_TAG_PREFIX = "tag:yaml.org,2002:"


@dataclass(slots=True)
class _Anchor:
    """The value of a YAML anchor (&name), for aliases (*name) that repeat it."""

    value: Any = None
    nodes: int = 0  # number of values in `value`, including itself
    chars: int = 0  # characters of all texts and keys in `value`
    depth: int = 0  # levels of nesting in `value`
    is_complete: bool = False


class _DocumentBuilder:
    """Builds the values of a document from the parser's events and enforces the limits.

    PyYAML's own constructors have no limits and follow YAML 1.1, so they are not used.
    """

    def __init__(self, events: Iterator[Any], *, is_json: bool) -> None:
        self.events = events
        self.is_json = is_json
        self.positions: dict[Loc, Position] = {}
        self.anchors: dict[str, _Anchor] = {}
        self.nodes = 0  # number of values so far
        self.chars = 0  # characters of all texts and keys so far
        self.deepest = 0  # deepest level in the node that is being built

    def build_document(self) -> Any:
        document: Any = None
        document_found = False
        for event in self.events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if document_found:
                raise_problem(
                    (),
                    _event_position(event),
                    "many_documents",
                    _("contains several YAML documents; keep one."),
                )
            document_found = True
            document = self._build_node(next(self.events), (), 0)
        return document

    def _build_node(self, event: Any, loc: Loc, depth: int) -> Any:
        position = _event_position(event)
        self.positions.setdefault(loc, position)
        self._count_nodes(1, 0, depth, loc, position)
        if isinstance(event, yaml.AliasEvent):
            return self._resolve_alias(event, loc, depth, position)
        anchor = _Anchor()
        if event.anchor:
            self.anchors[event.anchor] = anchor
        nodes_before, chars_before, deepest_before = self.nodes, self.chars, self.deepest
        self.deepest = depth
        if isinstance(event, yaml.MappingStartEvent):
            self._check_tag(event, loc, position, "map")
            value: Any = self._build_mapping(loc, depth)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._check_tag(event, loc, position, "seq")
            value = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                value.append(self._build_node(event, (*loc, len(value)), depth + 1))
        else:
            self._count_nodes(0, len(event.value), depth, loc, position)
            value = self._parse_scalar(event, loc, position)
        anchor.chars = self.chars - chars_before
        anchor.value, anchor.nodes, anchor.is_complete = value, self.nodes - nodes_before + 1, True
        anchor.depth = self.deepest - depth
        self.deepest = max(self.deepest, deepest_before)
        return value

    def _count_nodes(
        self, nodes: int, chars: int, depth: int, loc: Loc, position: Position
    ) -> None:
        self.nodes += nodes
        self.chars += chars
        self.deepest = max(self.deepest, depth)
        try:
            if depth > MAX_NESTING_DEPTH:
                refuse_too_deep()
            if self.nodes > MAX_VALUES:
                refuse_too_many_values(loc)
            if self.chars > MAX_TOTAL_CHARS:
                refuse_too_much_text(loc)
        except SpecError as error:
            raise SpecError(p.with_position(position) for p in error.problems) from None

    def _resolve_alias(self, event: Any, loc: Loc, depth: int, position: Position) -> Any:
        anchor = self.anchors.get(event.anchor)
        if anchor is None:
            raise_problem(
                loc,
                position,
                "unknown_alias",
                _("*%(anchor)s has no earlier &%(anchor)s.", anchor=event.anchor),
            )
        if not anchor.is_complete:
            raise_problem(
                loc,
                position,
                "recursive_alias",
                _("*%(anchor)s is inside &%(anchor)s itself.", anchor=event.anchor),
            )
        self._count_nodes(anchor.nodes - 1, anchor.chars, depth + anchor.depth, loc, position)
        return anchor.value

    def _build_mapping(self, loc: Loc, depth: int) -> dict[str, Any]:
        checkpoint()
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            position = _event_position(event)
            is_merge = (
                isinstance(event, yaml.ScalarEvent) and event.value == "<<" and not event.style
            )
            key = "<<" if is_merge else self._build_key(event, loc, depth)
            if not isinstance(key, str):
                raise_problem(
                    loc,
                    position,
                    "key_type",
                    _(
                        "has the key %(key)s, which is not text; put quotes around it.",
                        key=shorten(key),
                    ),
                )
            if key in result:
                raise_problem(
                    (*loc, key),
                    position,
                    "duplicate_key",
                    _("is defined twice (again in line %(line)s).", line=position.line),
                )
            self.positions[(*loc, key)] = position
            self._count_nodes(0, len(key), depth, loc, position)
            value = self._build_node(next(self.events), (*loc, key), depth + 1)
            if is_merge:
                self._merge(merged, value, loc, position)
            else:
                result[key] = value
        return {**merged, **result} if merged else result

    def _build_key(self, event: Any, loc: Loc, depth: int) -> Any:
        position = _event_position(event)
        if self.is_json:  # a key in JSON is always text
            return _check_text(event.value, loc, position)
        if isinstance(event, yaml.ScalarEvent) and not event.anchor:
            return self._parse_scalar(event, loc, position)
        return self._build_node(event, (*loc, ""), depth + 1)

    @staticmethod
    def _merge(merged: dict[str, Any], value: Any, loc: Loc, position: Position) -> None:
        for part in value if isinstance(value, list) else [value]:
            if not isinstance(part, dict):
                raise_problem(
                    loc,
                    position,
                    "merge",
                    _("<< must be followed by a mapping or a list of mappings."),
                )
            for key, merged_value in part.items():
                merged.setdefault(key, merged_value)

    @staticmethod
    def _check_tag(event: Any, loc: Loc, position: Position, *allowed: str) -> None:
        if event.tag not in (None, "!", *(f"{_YAML_TAG_PREFIX}{name}" for name in allowed)):
            raise_problem(
                loc,
                position,
                "tag",
                _(
                    "has the YAML tag %(tag)s, which is not supported.",
                    tag=shorten(event.tag),
                ),
            )

    def _parse_scalar(self, event: Any, loc: Loc, position: Position) -> Any:
        text = _check_text(event.value, loc, position)
        self._check_tag(event, loc, position, "str", "int", "float", "bool", "null")
        if event.tag in (None, "!"):
            is_text = not event.implicit[0] or event.style
        else:
            is_text = event.tag == f"{_YAML_TAG_PREFIX}str"
        return text if is_text else _parse_plain_scalar(text, loc, position)


def _parse_plain_scalar(text: str, loc: Loc, position: Position) -> Any:
    """Parse an unquoted scalar by the core schema of YAML 1.2."""
    if text in _YAML_NULL_TEXTS:
        return None
    if text in _YAML_BOOL_TEXTS:
        return _YAML_BOOL_TEXTS[text]
    if text[0] not in "+-.0123456789":
        return text
    if len(text) > MAX_NUMBER_DIGITS:
        if YAML_FLOAT.fullmatch(text):
            raise_problem(loc, position, "too_large", _("is a number with too many digits."), text)
        return text
    if YAML_INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if YAML_FLOAT.fullmatch(text):
        return float(text)
    if _YAML_INF_OR_NAN.fullmatch(text):
        raise_problem(
            loc,
            position,
            "not_finite",
            _("must be a finite number; put quotes around it if it is text."),
            text,
        )
    return text


def _event_position(event: Any) -> Position:
    return Position(event.start_mark.line + 1, event.start_mark.column + 1)


# Frequent error messages of libyaml 0.2 and PyYAML 6.0, listed here to be translated. Others are shown unchanged.
_YAML_MESSAGES: Mapping[str, Message] = {
    str(message): message
    for message in (
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


def _build_yaml_problem(error: yaml.YAMLError, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        reason = str(getattr(error, "reason", "") or error).splitlines()[0]
        position = getattr(error, "position", None)
        line = (
            text.count("\n", 0, position) + 1
            if isinstance(position, int) and position >= 0
            else None
        )
        return Problem(
            "", _("is not valid YAML: %(reason)s.", reason=shorten(reason)), code="yaml", line=line
        )
    line = mark.line + 1
    lines = text.splitlines()
    source_line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in source_line[: len(source_line) - len(source_line.lstrip())]:
        return Problem(
            "",
            _("is not valid YAML: line %(line)s is indented by a tab; use spaces.", line=line),
            "yaml_tab",
            line=line,
        )
    problem = getattr(error, "problem", None)
    reason = _YAML_MESSAGES.get(problem, problem) if problem else _("it cannot be read")
    if context := getattr(error, "context", None):
        reason = _(
            "%(words)s %(context)s", words=reason, context=_YAML_MESSAGES.get(context, context)
        )
    message = _(
        "is not valid YAML: %(reason)s (line %(line)s, column %(column)s).",
        reason=reason,
        line=line,
        column=mark.column + 1,
    )
    return Problem(
        "",
        message,
        code="yaml",
        value=shorten(source_line.strip()),
        line=line,
        column=mark.column + 1,
    )
