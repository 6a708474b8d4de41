"""Extracts numbers from a log with the regular expressions of the job file's `metrics` (FfDL's evaluation_metrics)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.errors import Invalid
from sluice.messages import t


@dataclass(frozen=True, slots=True)
class MetricGroup:
    name: str
    pattern: re.Pattern[str]
    scalars: Mapping[
        str, int | str
    ]  # name of the number → number or name of the group in `pattern`


def parse_metric_groups(spec: Mapping[str, Any]) -> list[MetricGroup]:
    """Return the groups of the job file. Raises Invalid if there are none or a regular expression is invalid."""
    metrics = spec.get("metrics") or {}
    parsed = []
    for name, row in (metrics.get("groups") or {}).items():
        text = row if isinstance(row, str) else (row or {}).get("regex", "")
        try:
            pattern = re.compile(str(text))
        except re.error as error:
            raise Invalid(
                t(
                    "The regular expression of the metrics group {name} is invalid: {problem}.",
                    name=name,
                    problem=str(error),
                ),
                code="metrics",
            ) from error
        scalars = row.get("scalars") if isinstance(row, Mapping) else None
        parsed.append(MetricGroup(str(name), pattern, _parse_scalars(scalars, pattern)))
    if not parsed:
        raise Invalid(
            t(
                "The job file has no metrics groups with a regex. Add evaluation_metrics (or metrics) to the next job file; TensorBoard curves are on the job's page."
            ),
            code="no_metrics",
        )
    return parsed


def _parse_scalars(declared: Any, pattern: re.Pattern[str]) -> dict[str, int | str]:
    """Parse {loss: loss}, {loss: 2} or FfDL's {loss: {type: FLOAT, value: 2}}; if absent, return all named groups."""
    if not isinstance(declared, Mapping):
        return {name: name for name in pattern.groupindex}
    parsed: dict[str, int | str] = {}
    for name, group_ref in declared.items():
        text = str(group_ref.get("value") if isinstance(group_ref, Mapping) else group_ref).strip(
            "\\"
        )
        if text.isdigit() and 0 < int(text) <= pattern.groups:
            parsed[str(name)] = int(text)
        elif text in pattern.groupindex:
            parsed[str(name)] = text
        elif name in pattern.groupindex:
            parsed[str(name)] = str(name)
    return parsed


def extract_metrics(lines: Iterable[str], groups: list[MetricGroup]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        for group in groups:
            if match := group.pattern.search(line):
                values = {name: _parse_number(match[key]) for name, key in group.scalars.items()}
                meta = {
                    k: _parse_number(v) for k, v in match.groupdict().items() if k not in values
                }
                yield {"group": group.name, "line": number, "values": values, "meta": meta}


def _parse_number(text: str | None) -> float | int | str | None:
    for number_type in (int, float):
        try:
            return number_type(text or "")
        except ValueError:
            continue
    return text
