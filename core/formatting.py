"""Durations, memory and file sizes as text, for pages, commands and messages.

static/sluice/format.js implements the same formats; tests of both use tests/formatting_cases.json.
"""

from __future__ import annotations

from django.utils.translation import gettext


def duration(seconds: float | None) -> str:
    """The two largest units, the second only if it is not zero: 3 d 4 h, 2 h 05 min, 10 min, 7 s."""
    if seconds is None:
        return "–"
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        text = gettext("%(days)s d %(hours)s h") if hours else gettext("%(days)s d")
    elif hours:
        text = gettext("%(hours)s h %(minutes)02d min") if minutes else gettext("%(hours)s h")
    elif minutes:
        both = gettext("%(minutes)s min %(seconds)02d s")
        text = both if seconds_left else gettext("%(minutes)s min")
    else:
        text = gettext("%(seconds)s s")
    return text % {"days": days, "hours": hours, "minutes": minutes, "seconds": seconds_left}


def compact_duration(seconds: float | None) -> str:
    """Slurm's format, for narrow columns: 2-03:04 (days, hours, minutes), 1:02:03, 0:07. Not translated."""
    if seconds is None:
        return "–"
    minutes, seconds_left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def memory(mib: int | None) -> str:
    if mib is None:
        return "–"
    if mib < 1024:
        return f"{mib} MB"
    gib = mib / 1024
    return f"{gib:.1f}".removesuffix(".0") + " GB" if gib < 100 else f"{gib:.0f} GB"


def hours(value: float | None) -> str:
    """GPU hours and machine hours: at most two decimals, 0.5, 12, 1.25."""
    return "–" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")


def filesize(size: int | None) -> str:
    if size is None:
        return "–"
    amount, units = float(size), ["B", "kB", "MB", "GB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        del units[0]
    # Three significant digits. The format .3g alone would write 1000 as 1e+03.
    return f"{float(f'{amount:.3g}'):g} {units[0]}"
