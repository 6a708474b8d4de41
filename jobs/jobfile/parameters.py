"""Parameters of templates: replaces placeholders `<% $parameters.name %>` in the values of a job file.

The syntax is that of OpenPAI v2 files. If a value is nothing but one placeholder, it becomes the parameter's value
with its type (a number stays a number); a placeholder inside other text becomes text. Keys are never replaced. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.messages import Message, _
from jobs.jobfile import Problem, SpecError
from jobs.jobfile.errors import MAX_PROBLEMS, find_similar, limit_problems
from jobs.jobfile.limits import TextBudget, check_document

PLACEHOLDER = re.compile(r"<%\s*\$parameters\.([A-Za-z_][A-Za-z0-9_]*)\s*%>")
_PARAMETER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}\Z")
PARAMETER_KINDS = ("text", "whole", "number", "flag", "choice")
MAX_PARAMETERS = 100
MAX_PARAMETER_CHARS = 10_000
_MAX_PARAMETER_NUMBER = 2**53  # JavaScript represents whole numbers exactly up to here

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class TemplateParameter:
    """One parameter of a template; the submit form has a field for it."""

    name: str
    title: str = ""
    description: str = ""
    kind: str = "text"
    required: bool = False
    default: Scalar | None = None
    choices: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "kind": self.kind,
            "required": self.required,
            "default": self.default,
            "choices": list(self.choices),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TemplateParameter:
        return cls(**{**value, "choices": tuple(value.get("choices", ()))})

    def sample_value(self) -> Scalar:
        """Return the default, or else any valid value, with which a template's job file can be checked."""
        if self.default is not None:
            return self.default
        if self.kind == "choice":
            return self.choices[0] if self.choices else "x"
        sample_values: dict[str, Scalar] = {"text": "x", "whole": 1, "number": 1, "flag": False}
        return sample_values[self.kind]


def parse_parameter_value(parameter: TemplateParameter, value: Any) -> Scalar:
    """Check a value and convert it to the parameter's kind. Raises SpecError.

    Text is accepted for numbers and flags, such as "4" and "true".
    """
    path = f"parameters.{parameter.name}"

    def refuse(message: Message) -> SpecError:
        return SpecError([Problem(path, message, code="parameter", value=str(value)[:80])])

    kind = parameter.kind
    if kind in ("text", "choice"):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise refuse(_("must be text."))
        text = str(value)
        if len(text) > MAX_PARAMETER_CHARS or "\0" in text:
            raise refuse(
                _(
                    "must be text of at most %(limit)s characters, without NUL.",
                    limit=MAX_PARAMETER_CHARS,
                )
            )
        if kind == "choice" and text not in parameter.choices:
            raise refuse(_("must be one of %(choices)s.", choices=", ".join(parameter.choices)))
        return text
    if kind == "flag":
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise refuse(_("must be true or false."))
        return value
    number = _parse_number(value)
    if number is None or (kind == "whole" and not float(number).is_integer()):
        raise refuse(_("must be a whole number.") if kind == "whole" else _("must be a number."))
    return int(number) if kind == "whole" else number


def _parse_number(value: Any) -> int | float | None:
    if isinstance(value, str):
        try:
            value = int(value) if re.fullmatch(r"\s*[+-]?\d{1,15}\s*", value) else float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) > _MAX_PARAMETER_NUMBER or not math.isfinite(value):
        return None
    return value


def find_parameter_names(value: Any) -> set[str]:
    """Find the parameter names in all placeholders of a job file."""
    return {name for text in _iter_strings(value) for name in PLACEHOLDER.findall(text)}


def _iter_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_strings(item)


def substitute_parameters(
    value: Any, values: Mapping[str, Scalar], budget: TextBudget | None = None
) -> Any:
    """Replace the placeholders in a job file. Placeholders of parameters without a value stay.

    Raises SpecError if the result has more text than a job file may have.
    """
    budget = budget or TextBudget()
    if isinstance(value, str):
        budget.spend(value)
        sole_placeholder = PLACEHOLDER.fullmatch(value)
        if sole_placeholder and sole_placeholder.group(1) in values:
            return values[sole_placeholder.group(1)]
        return PLACEHOLDER.sub(
            lambda match: (
                budget.spend(_format_parameter_value(values[match[1]]))
                if match[1] in values
                else match[0]
            ),
            value,
        )
    if isinstance(value, Mapping):
        return {key: substitute_parameters(item, values, budget) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [substitute_parameters(item, values, budget) for item in value]
    return value


def _format_parameter_value(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def check_parameters(parameters: Sequence[TemplateParameter], job_file: Any) -> None:
    """Check the parameters of a template, and that its job file uses only these. Raises SpecError."""
    check_document(job_file)
    problems: list[Problem] = []
    names: dict[str, int] = {}  # name → index of its first declaration
    for index, parameter in enumerate(parameters):
        path = f"parameters[{index}]"
        if not _PARAMETER_NAME.match(parameter.name):
            problems.append(
                Problem(f"{path}.name", _("must be letters, digits and _, no digit first."), "name")
            )
        if names.setdefault(parameter.name, index) != index:
            problems.append(Problem(f"{path}.name", _("is declared twice."), "duplicate"))
        if parameter.kind == "choice" and not parameter.choices:
            problems.append(
                Problem(f"{path}.choices", _("must name at least one choice."), "choices")
            )
        elif parameter.default is not None:
            try:
                parse_parameter_value(parameter, parameter.default)
            except SpecError as error:
                problems.append(Problem(f"{path}.default", error.problems[0].message, "default"))
    unknown = sorted(find_parameter_names(job_file) - set(names))
    for name in unknown[:MAX_PROBLEMS]:
        problems.append(
            Problem(
                "spec",
                _("uses the parameter %(name)s, which the template does not declare.", name=name),
                "unknown_parameter",
                suggestion=find_similar(name, names, cutoff=0.5),
            )
        )
    if problems:
        raise SpecError(limit_problems(problems))


def fill_template(
    job_file: Any, parameters: Sequence[TemplateParameter], given: Mapping[str, Any]
) -> Any:
    """Replace the placeholders in a template's job file by the given values, or by defaults. Raises SpecError."""
    check_document(job_file)
    by_name = {parameter.name: parameter for parameter in parameters}
    unknown = [name for name in given if name not in by_name]
    problems = [
        Problem(
            f"parameters.{name[:80]}",
            _("is not a parameter of this template."),
            "unknown_parameter",
            suggestion=find_similar(name, by_name, cutoff=0.5),
        )
        for name in unknown[:MAX_PROBLEMS]
    ]
    values: dict[str, Scalar] = {}
    for name, parameter in by_name.items():
        value = given.get(name)
        if value is None or value == "":
            if parameter.default is not None and value is None:
                values[name] = parameter.default
                continue
            if parameter.required:
                problems.append(Problem(f"parameters.{name}", _("is required."), "required"))
                continue
            if value is None:
                value = "" if parameter.kind == "text" else parameter.sample_value()
        try:
            values[name] = parse_parameter_value(parameter, value)
        except SpecError as error:
            problems.extend(error.problems)
    if problems:
        raise SpecError(problems)
    return substitute_parameters(job_file, values)
