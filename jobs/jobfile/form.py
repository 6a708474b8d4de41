"""Form metadata of job file fields: where a form shows a field and how.

`form()` is given as `json_schema_extra` of a field in the model, next to `title` (the label) and
`description` (the tip). `jobs.form_description` builds forms from it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

FORM_KEY = "x-form"
Width = Literal["", "quarter", "third", "half", "full"]


def form(
    group: str,
    *,
    professional: bool = False,
    distributed: bool = False,
    help: str = "",
    placeholder: str = "",
    choices: Mapping[str, str] | None = None,
    add: str = "",
    widget: str = "",
    width: Width = "",
    minimum: int | None = None,
    initial: Any = None,
) -> dict[str, Any]:
    """Fields of one group are shown together in the model's order; lists and professional fields last.

    `distributed` fields are hidden for single-task jobs. `choices` maps values to labels; `add` is
    the label of the button that adds a row; `initial` is the value in a new row, if not the default.
    """
    options = {
        "group": group,
        "professional": professional,
        "distributed": distributed,
        "help": help,
        "placeholder": placeholder,
        "choices": dict(choices or {}),
        "add": add,
        "widget": widget,
        "width": width,
        "minimum": minimum,
        "initial": initial,
    }
    unset: tuple[Any, ...] = (None, False, "", {})
    return {
        FORM_KEY: {
            name: value
            for name, value in options.items()
            if value not in unset or type(value) is int
        }
    }
