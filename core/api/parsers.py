"""Parses JSON request bodies into values that the database can store.

Rejects a body that is too large, nested too deeply, not UTF-8 or not JSON, before the view uses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any

from django.conf import settings
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from rest_framework.exceptions import APIException, ParseError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

JSON_TYPES = ("application/json",)
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")
MAX_JSON_DEPTH = 100


class BodyTooLarge(APIException):
    status_code = 413
    default_code = "too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            _("The request's body may have %(limit)s bytes at most.") % {"limit": limit_bytes}
        )


def read_body(stream: IO[bytes], context: Mapping[str, Any] | None) -> bytes:
    """Return the whole body. Raises BodyTooLarge, before reading anything if Content-Length exceeds the limit."""
    limit: int = settings.API_MAX_BODY_BYTES
    request = (context or {}).get("request")
    try:
        content_length = int(request.META.get("CONTENT_LENGTH") or 0) if request is not None else 0
    except ValueError:
        content_length = 0
    if content_length > limit:
        raise BodyTooLarge(limit)
    body = stream.read(limit + 1)
    if len(body) > limit:
        raise BodyTooLarge(limit)
    return body


# Error messages of Python's json module that have translations. Messages not listed here are shown in English.
JSON_ERROR_MESSAGES = (
    gettext_noop("Expecting value"),
    gettext_noop("Expecting ',' delimiter"),
    gettext_noop("Expecting ':' delimiter"),
    gettext_noop("Expecting property name enclosed in double quotes"),
    gettext_noop("Extra data"),
    gettext_noop("Unterminated string starting at"),
    gettext_noop("Invalid control character at"),
    gettext_noop("Invalid \\escape"),
    gettext_noop("Invalid \\uXXXX escape"),
)


def parse_json(body: bytes) -> Any:
    """Parse JSON into storable values: rejects NaN, NUL, lone surrogates and deep nesting."""
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        # ValueError: invalid JSON, invalid UTF-8, or a number with thousands of digits.
        if not isinstance(error, json.JSONDecodeError):
            raise ParseError(_("The body is not JSON that can be read.")) from error
        error_params = {"words": _(error.msg), "line": error.lineno, "column": error.colno}
        raise ParseError(
            _(
                "The body is not JSON that can be read: %(words)s (line %(line)s, column %(column)s)."
            )
            % error_params
        ) from error
    # Without that many brackets nothing can be nested too deeply; counting them is much faster than the check.
    if text.count("[") + text.count("{") > MAX_JSON_DEPTH:
        _check_depth(value)
    # Databases cannot store NUL and lone surrogates. In valid UTF-8 they can occur only as escapes (\u0000, \ud800).
    if "\\u" in text:
        for string in _iter_strings(value):
            if "\0" in string or not _is_encodable(string):
                raise ParseError(
                    _(
                        "The body contains a NUL character or invalid Unicode (an unpaired surrogate)."
                    )
                )
    return value


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _check_depth(value: Any) -> None:
    level = [value]  # the values at one depth
    for _depth in range(MAX_JSON_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise ParseError(_("The body is nested more than %(depth)s deep.") % {"depth": MAX_JSON_DEPTH})


def _iter_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _iter_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_strings(item)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class JsonParser(BaseParser):
    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> Any:
        return parse_json(read_body(stream, parser_context))


class JsonContentNegotiation(BaseContentNegotiation):
    """Answers in JSON whatever the Accept header contains. Views that return YAML or bytes read the header themselves.

    A parser may list further media types in `media_types`.
    """

    def select_parser(self, request: Request, parsers: Any) -> BaseParser | None:
        media_type = (request.content_type or "").partition(";")[0].strip().lower()
        for parser in parsers:
            if media_type in (parser.media_type, *getattr(parser, "media_types", ())):
                return parser  # type: ignore[no-any-return]
        return None

    def select_renderer(
        self, request: Request, renderers: Any, format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        renderer = renderers[0]
        return renderer, renderer.media_type
