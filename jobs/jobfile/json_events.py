"""A JSON parser that yields the same events as PyYAML's parser, so that `parse` builds values of both formats alike.

Comments and trailing commas are skipped, and `list_warnings` reports them. libyaml 0.2 is not used for JSON,
because it refuses surrogate pairs in \\u escapes and keys of more than 1,024 characters. `parse` enforces the
limits. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

import yaml

from core.messages import Message, _, msg
from jobs.jobfile.errors import Loc, Position, SpecWarning, raise_problem, shorten

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_REST_OF_STRING = re.compile(r'[^"\n]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_BARE_WORD = re.compile(r"[A-Za-z_$][\w$-]*")
_LITERALS = ("true", "false", "null")


class JsonEvents:
    """The events of one JSON document. Iterating raises SpecError at a syntax error."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.offset = 0  # index in `text` of the next character to scan
        self.comment: Position | None = None  # position of the first comment
        self.trailing_comma: Position | None = None  # position of the first trailing comma
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._line = 0

    def __iter__(self) -> Iterator[yaml.Event]:
        self._skip_whitespace()
        yield yaml.DocumentStartEvent(self._mark())
        yield from self._scan_value(())
        self._skip_whitespace()
        if self.offset < len(self.text):
            self._raise_syntax_error(_("there is more text after the end of the job file"), ())

    def list_warnings(self) -> list[SpecWarning]:
        warnings = []
        if self.comment:
            message = msg(
                "import.json-comments",
                "contains comments, which JSON does not allow; they are ignored.",
            )
            warnings.append(SpecWarning("", message, self.comment.line))
        if self.trailing_comma:
            message = msg(
                "import.json-trailing-comma",
                "has a comma before a closing bracket; it is ignored.",
            )
            warnings.append(SpecWarning("", message, self.trailing_comma.line))
        return warnings

    def _mark(self) -> yaml.Mark:
        starts = self._line_starts
        while self._line + 1 < len(starts) and starts[self._line + 1] <= self.offset:
            self._line += 1  # the offset only increases, so the search continues at the last line
        return yaml.Mark("", self.offset, self._line, self.offset - starts[self._line], None, 0)

    def _current_position(self) -> Position:
        mark = self._mark()
        return Position(mark.line + 1, mark.column + 1)

    def _raise_syntax_error(self, what: Message, loc: Loc) -> NoReturn:
        position = self._current_position()
        raise_problem(
            loc,
            position,
            "json",
            _(
                "is not valid JSON: %(what)s (line %(line)s, column %(column)s).",
                what=what,
                line=position.line,
                column=position.column,
            ),
        )

    def _skip_whitespace(self) -> None:
        while True:
            self.offset = _SPACE.match(self.text, self.offset).end()  # type: ignore[union-attr]
            if not self.text.startswith("/", self.offset):
                return
            match = _COMMENT.match(self.text, self.offset)
            if not match:
                return
            self.comment = self.comment or self._current_position()
            self.offset = match.end()

    def _scan_value(self, loc: Loc) -> Iterator[yaml.Event]:
        mark = self._mark()
        start = self.text[self.offset : self.offset + 1]
        if start == "{":
            yield yaml.MappingStartEvent(None, None, True, mark)
            yield from self._scan_members(loc)
            yield yaml.MappingEndEvent(mark)
        elif start == "[":
            yield yaml.SequenceStartEvent(None, None, True, mark)
            yield from self._scan_elements(loc)
            yield yaml.SequenceEndEvent(mark)
        elif start == '"':
            yield self._scan_string(loc)
        else:
            yield yaml.ScalarEvent(None, None, (True, False), self._scan_plain(loc), mark)

    def _scan_plain(self, loc: Loc) -> str:
        """Scan a number, true, false or null."""
        if match := _NUMBER.match(self.text, self.offset):
            self.offset = match.end()
            return match.group()
        word = _BARE_WORD.match(self.text, self.offset)
        if word and word.group() in _LITERALS:
            self.offset = word.end()
            return word.group()
        if word:
            self._raise_syntax_error(
                _('"%(word)s" must be in double quotes', word=shorten(word.group())), loc
            )
        if self.text.startswith("'", self.offset):
            self._raise_syntax_error(_("text must be in double quotes, not single quotes"), loc)
        self._raise_syntax_error(_("a value is missing here"), loc)

    def _scan_string(self, loc: Loc) -> yaml.ScalarEvent:
        mark = self._mark()
        match = _STRING.match(self.text, self.offset)
        if not match:
            rest = _REST_OF_STRING.match(self.text, self.offset + 1)
            self.offset = rest.end() if rest else self.offset
            self._raise_syntax_error(
                _("text has no closing quote on its line, or contains a control character"), loc
            )
        try:
            value = str(json.loads(match.group()))
        except ValueError:
            self._raise_syntax_error(_("text contains an unknown backslash escape"), loc)
        self.offset = match.end()
        return yaml.ScalarEvent(None, None, (False, True), value, mark, style='"')

    def _scan_members(self, loc: Loc) -> Iterator[yaml.Event]:
        self.offset += 1
        self._skip_whitespace()
        while not self.text.startswith("}", self.offset):
            if not self.text.startswith('"', self.offset):
                self._raise_syntax_error(_("a field name in double quotes, or }, must follow"), loc)
            key = self._scan_string(loc)
            yield key
            self._skip_whitespace()
            if not self.text.startswith(":", self.offset):
                self._raise_syntax_error(
                    _('a colon must follow "%(key)s"', key=shorten(key.value)), loc
                )
            self.offset += 1
            self._skip_whitespace()
            yield from self._scan_value((*loc, key.value))
            self._skip_comma("}", loc)
        self.offset += 1

    def _scan_elements(self, loc: Loc) -> Iterator[yaml.Event]:
        self.offset += 1
        self._skip_whitespace()
        index = 0
        while not self.text.startswith("]", self.offset):
            yield from self._scan_value((*loc, index))
            self._skip_comma("]", loc)
            index += 1
        self.offset += 1

    def _skip_comma(self, closing: str, loc: Loc) -> None:
        self._skip_whitespace()
        if self.text.startswith(",", self.offset):
            comma = self._current_position()
            self.offset += 1
            self._skip_whitespace()
            if self.text.startswith(closing, self.offset):
                self.trailing_comma = self.trailing_comma or comma
        elif not self.text.startswith(closing, self.offset):
            self._raise_syntax_error(_("a comma or %(closing)s must follow", closing=closing), loc)
