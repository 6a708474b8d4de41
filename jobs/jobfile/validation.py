"""Validates the mapping of a job file: returns a JobSpec or raises all problems at once.

Converts pydantic's errors into problems; no other module reads pydantic errors. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from core.messages import Message, _
from jobs.jobfile.errors import (
    MAX_PROBLEMS,
    Loc,
    Position,
    Problem,
    SpecError,
    build_more_problem,
    find_similar,
    format_path,
    nearest_position,
    shorten,
)
from jobs.jobfile.fields import describe_type
from jobs.jobfile.model import RULES_CODE, JobSpec
from jobs.jobfile.rules import MAX_RULE_VIOLATIONS, RuleViolation, find_rule_violations

Positions = Mapping[Loc, Position]


def validate_document(
    document: Any, *, positions: Positions, source_of: Callable[[Loc], Loc]
) -> JobSpec:
    """Validate a mapping with the keys of a job file. Raises SpecError.

    `source_of` maps a location in the document, which an importer made, to the location in the original file, so
    that problems name the paths of the original file. `positions` are those of the original file.
    """
    if not isinstance(document, Mapping):
        raise SpecError.single(
            "",
            _("must be a mapping of fields, not %(kind)s.", kind=describe_type(document)),
            code="not_a_mapping",
        )
    try:
        return JobSpec.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        found = _find_problems(error, document)
    if not found:  # the model refused what the rules on the mapping accept: a programming error
        raise SpecError.single("", _("is not a valid job file."))
    raise SpecError(_locate_problems(found, positions, source_of))


def replace_fields(spec: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
    """Replace fields of a job, given by their keys in files. Raises SpecError."""
    document = {**spec.model_dump(mode="json", by_alias=True), **changes}
    return validate_document(document, positions={}, source_of=lambda loc: loc)


def _find_problems(
    error: ValidationError, document: Mapping[str, Any]
) -> dict[Loc, dict[str, Callable[[], Problem]]]:
    """Find all problems: location in the document → code → function that builds the problem.

    Building a problem costs much more than finding it, so that is done only for those that are reported.
    """
    found: dict[Loc, dict[str, Callable[[], Problem]]] = {}
    convert_loc = _LocConverter(document)
    for details in error.errors(include_url=False, include_input=False):
        if details["type"] != f"sluice_{RULES_CODE}":
            loc = convert_loc(details["loc"])
            build = partial(_build_pydantic_problem, details, loc, document)
            found.setdefault(loc, {})[details["type"]] = build
    violated: dict[Loc, dict[str, Callable[[], Problem]]] = {}
    for violation in islice(find_rule_violations(document), MAX_RULE_VIOLATIONS):
        build = partial(_build_rule_problem, violation)
        violated.setdefault(violation.loc, {})[violation.code] = build
    return {**found, **violated}  # a violated rule replaces other problems at the same location


def _locate_problems(
    found: Mapping[Loc, Mapping[str, Callable[[], Problem]]],
    positions: Positions,
    source_of: Callable[[Loc], Loc],
) -> list[Problem]:
    """Build the first problems in the order of the file, with the path, line and column in the original file."""
    located = []
    for loc, builders in found.items():
        source_loc = source_of(loc)
        position = nearest_position(positions, source_loc)
        order = (position.line, position.column) if position else (0, 0)
        located += [(order, source_loc, position, build) for build in builders.values()]
    located.sort(key=lambda row: row[0])
    problems = [
        replace(build(), path=format_path(source_loc)).with_position(position)
        for _order, source_loc, position, build in located[:MAX_PROBLEMS]
    ]
    more = len(located) - len(problems)
    return [*problems, build_more_problem(more)] if more else problems


class _LocConverter:
    """Converts the location in a pydantic error to the location in the file.

    The locations differ if the file has a mapping where the model has a list (`parameters`), and for problems of a
    mapping's key, to which pydantic appends "[key]".
    """

    def __init__(self, document: Any) -> None:
        self._document = document
        self._keys: dict[int, list[str]] = {}  # id of a mapping → its keys

    def __call__(self, loc: tuple[int | str, ...]) -> Loc:
        file_loc: list[str | int] = []
        value = self._document
        for part in loc:
            if part == "[key]":
                continue
            if isinstance(part, int) and isinstance(value, Mapping):
                keys = self._keys.setdefault(id(value), [])
                keys += () if keys else value
                return (*file_loc, keys[part])
            file_loc.append(part)
            value = _value_at(value, (part,))
        return tuple(file_loc)


def _build_rule_problem(violation: RuleViolation) -> Problem:
    return Problem(
        format_path(violation.loc),
        violation.message,
        code=violation.code,
        value=shorten(violation.value),
    )


def _build_pydantic_problem(details: ErrorDetails, loc: Loc, document: Any) -> Problem:
    kind = details["type"]
    value = _value_at(document, loc)
    if kind == "extra_forbidden":
        return _build_unknown_key_problem(loc, value)
    context = details.get("ctx") or {}
    if kind.startswith("sluice_"):
        code = kind.removeprefix("sluice_")
        message: Message = context["message"]
    else:
        code, message = kind, _PYDANTIC_MESSAGES.get(kind, _default_message)(context, value)
    shown = "" if kind == "missing" else shorten(value)
    return Problem(format_path(loc), message, code=code, value=shown)


def _default_message(context: Mapping[str, Any], value: object) -> Message:
    return _("has a value that does not fit (%(kind)s).", kind=describe_type(value))


_PYDANTIC_MESSAGES: Mapping[str, Callable[[Mapping[str, Any], object], Message]] = {
    "missing": lambda c, v: _("is required."),
    "tuple_type": lambda c, v: _("must be a list, not %(kind)s.", kind=describe_type(v)),
    "list_type": lambda c, v: _("must be a list, not %(kind)s.", kind=describe_type(v)),
    "dict_type": lambda c, v: _("must be a mapping, not %(kind)s.", kind=describe_type(v)),
    "model_type": lambda c, v: _(
        "must be a mapping of fields, not %(kind)s.", kind=describe_type(v)
    ),
    "model_attributes_type": lambda c, v: _(
        "must be a mapping of fields, not %(kind)s.", kind=describe_type(v)
    ),
    "float_type": lambda c, v: _("must be a number, not %(kind)s.", kind=describe_type(v)),
    "float_parsing": lambda c, v: _("must be a number, not %(kind)s.", kind=describe_type(v)),
    "finite_number": lambda c, v: _("must be a finite number."),
    "greater_than": lambda c, v: _("must be more than %(low)s.", low=f"{c['gt']:g}"),
    "less_than_equal": lambda c, v: _("must be at most %(high)s.", high=f"{c['le']:g}"),
    "string_type": lambda c, v: _("must be text, not %(kind)s.", kind=describe_type(v)),
    "recursion_loop": lambda c, v: _("must not contain itself."),
}


def _build_unknown_key_problem(loc: Loc, value: object) -> Problem:
    key = str(loc[-1])
    keys_by_normalized_key = {
        name.lower().replace("_", ""): name for name in _list_known_keys(loc[:-1])
    }
    similar = find_similar(key.lower().replace("_", ""), keys_by_normalized_key, cutoff=0.7)
    suggestion = keys_by_normalized_key.get(similar, "")
    message = _("is not a field of a job file.")
    if suggestion:
        message = _(
            'is not a field of a job file. Did you mean "%(suggestion)s"?', suggestion=suggestion
        )
    return Problem(
        format_path(loc),
        message,
        code="unknown_key",
        value=shorten(value),
        suggestion=suggestion,
    )


def _list_known_keys(loc: Loc) -> list[str]:
    """List the keys that the section at a location may have."""
    model: type[BaseModel] | None = JobSpec
    for part in loc:
        if model is None or isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if (f.alias or n) == part), None)
        model = _find_model(field.annotation) if field else None
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _find_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, Union, UnionType):
        found = (_find_model(argument) for argument in get_args(annotation))
        return next((model for model in found if model), None)
    return None


def _value_at(document: Any, loc: Loc) -> object:
    value = document
    for part in loc:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return ""
    return value
