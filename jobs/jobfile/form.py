"""Form metadata of job file fields: where the submit form shows a field, and how.

Fields of the model have the result of `form()` as `json_schema_extra`, besides `title` (the label) and
`description` (the explanation). `jobs.form_description` builds forms from them. Pure.
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
    """Build the form metadata of a field.

    The form shows the fields of one `group` together, in the order of the model, with lists and `professional`
    fields last. `distributed` fields are hidden for jobs with a single task. `choices` maps values to labels.
    `add` is the label of the button that adds a row to a list. `initial` is the value in a new row, if it is not
    the field's default.
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
