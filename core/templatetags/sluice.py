"""Template tags and filters of all pages: durations, sizes, times, icons, query strings."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django import template
from django.templatetags.static import static
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from core import formatting

register = template.Library()
for _filter in (
    formatting.duration,
    formatting.compact_duration,
    formatting.memory,
    formatting.hours,
    formatting.filesize,
):
    register.filter(_filter.__name__, _filter)


@register.simple_tag
def icon(name: str, css_class: str = "") -> SafeString:
    return format_html(
        '<svg class="icon {}" aria-hidden="true"><use href="{}#{}"></use></svg>',
        css_class,
        static("vendor/icons.svg"),
        name,
    )


@register.filter
def local_time(value: Any) -> SafeString | str:
    """Return a <time> element in the server's time zone, which times.js replaces by the reader's."""
    if not value:
        return "–"
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    local = timezone.localtime(value)
    return format_html(
        '<time datetime="{}" data-local>{}</time>',
        value.isoformat(),
        local.strftime("%Y-%m-%d %H:%M"),
    )


@register.filter
def percentage(part: float | None, whole: float | None) -> int:
    return round(100 * (part or 0) / whole) if whole else 0


@register.simple_tag(takes_context=True)
def with_query(context: dict[str, Any], **changes: Any) -> str:
    """Return the page's query string with these changes: "" or None removes a parameter. Also removes the cursor."""
    query = context["request"].GET.copy()
    query.pop("cursor", None)
    for name, value in changes.items():
        if value in ("", None):
            query.pop(name, None)
        else:
            query[name] = value
    return "?" + query.urlencode() if query else "?"
