"""Replaces OpenPAI v2's placeholders such as `<% $parameters.x %>` in commands. Pure.

A value of a secret never becomes part of a command: its placeholder becomes a reference to an environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from jobs.jobfile.limits import TextBudget

_PLACEHOLDER = re.compile(r"<%\s*\$(?P<root>[A-Za-z_]+)(?P<path>(?:\.[\w-]+|\[\d{1,9}\])*)\s*%>")
_PATH_STEP = re.compile(r"\.(?P<key>[\w-]+)|\[(?P<index>\d{1,9})\]")
_CHARS_PER_TEMPLATE = 64  # each counts as so much text, because short ones cost time, too
SECRET_VARIABLE_PREFIX = "PAI_SECRETS_"  # noqa: S105  # a prefix of names


def resolve_path(root: Any, path: str) -> Any:
    """Find the value at a path such as .a.b[0]. None if there is none."""
    value = root
    for step in _PATH_STEP.finditer(path):
        try:
            value = value[step["key"]] if step["key"] is not None else value[int(step["index"])]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def format_scalar(value: Any) -> str | None:
    """Format a scalar as OpenPAI does, numbers as in JavaScript. None for other types."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _format_javascript_number(value)
    if isinstance(value, str | int):
        return str(value)
    return None


def _format_javascript_number(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-6 <= abs(value) < 1e21:
        text = format(Decimal(repr(value)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = repr(value).partition("e")
    sign = "-" if exponent.startswith("-") else "+"
    return f"{mantissa.removesuffix('.0')}e{sign}{exponent.lstrip('+-0')}"


def render_template(
    text: str,
    context: Mapping[str, Any],
    resolve_secret: Callable[[str], str | None],
    budget: TextBudget,
) -> str:
    """Replace the placeholders whose values `context` has. Other placeholders stay.

    `resolve_secret` returns the replacement for the path behind `$secrets`, or None. Raises SpecError if the
    replacements exceed the budget.
    """
    budget.spend(text, extra=_CHARS_PER_TEMPLATE)

    def replace(match: re.Match[str]) -> str:
        if match["root"] == "secrets":
            value_text = resolve_secret(match["path"])
        elif match["root"] in context:
            value_text = format_scalar(resolve_path(context[match["root"]], match["path"]))
        else:
            value_text = None
        return match.group() if value_text is None else budget.spend(value_text)

    return _PLACEHOLDER.sub(replace, text)


def secret_variable_name(path: str) -> str:
    """Name the environment variable that has the value of a secret: .token → PAI_SECRETS_token."""
    return SECRET_VARIABLE_PREFIX + re.sub(r"\W+", "_", path.strip(".]").replace("[", "_"))
