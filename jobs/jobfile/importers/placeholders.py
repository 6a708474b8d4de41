"""OpenPAI v2's `<% $parameters.x %>` templates. Pure.

Values of secrets never become part of a command: their references become environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

_TEMPLATE = re.compile(r"<%\s*\$(?P<root>[A-Za-z_]+)(?P<path>(?:\.[\w-]+|\[\d+\])*)\s*%>")
_STEP = re.compile(r"\.(?P<key>[\w-]+)|\[(?P<index>\d+)\]")
VARIABLE_PREFIX = "PAI_SECRETS_"


def resolve_path(root: Any, path: str) -> Any:
    """The value at the path .a.b[0], or None."""
    value = root
    for step in _STEP.finditer(path):
        try:
            value = value[step["key"]] if step["key"] is not None else value[int(step["index"])]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def format_scalar(value: Any) -> str | None:
    """A scalar as OpenPAI formats it (JavaScript's number format); None for other types."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _javascript_number(value)
    if isinstance(value, str | int):
        return str(value)
    return None


def _javascript_number(value: float) -> str:
    if value == 0:
        return "0"
    if 1e-6 <= abs(value) < 1e21:
        text = format(Decimal(repr(value)), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = repr(value).partition("e")
    sign = "-" if exponent.startswith("-") else "+"
    return f"{mantissa.removesuffix('.0')}e{sign}{exponent.lstrip('+-0')}"


def render_template(
    text: str, context: Mapping[str, Any], resolve_secret: Callable[[str], str | None]
) -> str:
    """Replaces references that the context defines; unknown references stay.

    `secret` maps the path behind $secrets to its replacement, or None.
    """

    def replace(match: re.Match[str]) -> str:
        if match["root"] == "secrets":
            value_text = resolve_secret(match["path"])
        elif match["root"] in context:
            value_text = format_scalar(resolve_path(context[match["root"]], match["path"]))
        else:
            value_text = None
        return match.group() if value_text is None else value_text

    return _TEMPLATE.sub(replace, text)


def secret_variable_name(path: str) -> str:
    """The environment variable that carries a secret: .token → PAI_SECRETS_token."""
    return VARIABLE_PREFIX + re.sub(r"\W+", "_", path.strip(".]").replace("[", "_"))
