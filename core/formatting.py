"""Durations, memory and file sizes as text, for pages, commands and messages.

static/sluice/format.js implements the same formats; tests of both use tests/formatting_cases.json.
"""

from __future__ import annotations

from django.utils.translation import gettext


def duration(seconds: float | None) -> str:
    """The two largest units: 3 d 4 h, 2 h 05 min, 4 min 09 s, 7 s."""
    if seconds is None:
        return "–"
    whole = int(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, left = divmod(rest, 60)
    if days:
        return gettext("%(days)s d %(hours)s h") % {"days": days, "hours": hours}
    if hours:
        return gettext("%(hours)s h %(minutes)02d min") % {"hours": hours, "minutes": minutes}
    if minutes:
        return gettext("%(minutes)s min %(seconds)02d s") % {"minutes": minutes, "seconds": left}
    return gettext("%(seconds)s s") % {"seconds": left}


def compact_duration(seconds: float | None) -> str:
    """Slurm's format, for narrow columns: 2-03:04 (days, hours, minutes), 1:02:03, 0:07. Not translated."""
    if seconds is None:
        return "–"
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def memory(mib: int | None) -> str:
    if mib is None:
        return "–"
    if mib < 1024:
        return f"{mib} MB"
    gib = mib / 1024
    return f"{gib:.1f}".removesuffix(".0") + " GB" if gib < 100 else f"{gib:.0f} GB"


def filesize(size: int | None) -> str:
    if size is None:
        return "–"
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            # Three significant digits. The format .3g alone would write 1000 as 1e+03.
            return f"{float(f'{amount:.3g}'):g} {unit}"
        amount /= 1000
    return ""
