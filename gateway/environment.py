"""Reads settings from environment variables. An invalid value raises ImproperlyConfigured with one sentence about it."""

from __future__ import annotations

import os
from collections.abc import Collection

from django.core.exceptions import ImproperlyConfigured


def env_flag(name: str, default: bool = False) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return default
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ImproperlyConfigured(f"{name} must be 1 or 0; it is {value!r}.")


def env_int(name: str, default: int, minimum: int = 0) -> int:
    text = os.environ.get(name, "").strip()
    try:
        value = int(text) if text else default
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a whole number; it is {text!r}.") from None
    if text and value < minimum:
        raise ImproperlyConfigured(f"{name} must be at least {minimum}; it is {value}.")
    return value


def env_choice(name: str, default: str, choices: Collection[str]) -> str:
    value = os.environ.get(name, "").strip() or default
    if value not in choices:
        raise ImproperlyConfigured(f"{name} must be one of {', '.join(choices)}; it is {value!r}.")
    return value


def env_list(name: str, default: str = "") -> list[str]:
    return [item.strip() for item in os.environ.get(name, default).split(",") if item.strip()]
