"""Where Sluice is and who asks: the environment first, then what `sluice login` kept (0600)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sluice.errors import NotConfigured
from sluice.http import Door
from sluice.messages import t

# Of a token made from a password in the environment. One about to end is not worth beginning with.
LIFETIME = timedelta(days=1)
SPARE = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Connection:
    url: str
    token: str
    source: str  # "environment", "login" or "password"


@dataclass(frozen=True, slots=True)
class PasswordSignIn:
    """The older variables: DLAAS_URL with MLSS_AUTH_USER and MLSS_AUTH_PASSWD (base64)."""

    user: str
    password: str


def config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "sluice" / "config.toml"


def cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sluice" / "tokens.json"


def read_config() -> dict[str, str]:
    path = config_path()
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NotConfigured(
            t(
                "{path} cannot be read ({problem}). Run: sluice login",
                path=str(path),
                problem=str(error),
            ),
            code="config_broken",
        ) from error
    return {key: value for key, value in found.items() if isinstance(value, str)}


def write_config(values: Mapping[str, str]) -> Path:
    path = config_path()
    lines = ["# Written by “sluice login”. The token is a password: keep this file to yourself."]
    # JSON's strings are TOML's basic strings.
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    write_private(path, "\n".join(lines) + "\n")
    return path


def write_private(path: Path, text: str) -> None:
    """Readable by its owner alone from the first moment on, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(fresh, path)


def connection(url: str | None = None) -> Connection:
    """Raises NotConfigured with what to do."""
    environment = os.environ
    kept = read_config()
    address = (
        url or environment.get("SLUICE_URL") or environment.get("DLAAS_URL") or kept.get("url")
    )
    if not address:
        raise NotConfigured(
            t("Sluice's address is not known. Run: sluice login  (or set SLUICE_URL)"),
            code="no_url",
        )
    if token := environment.get("SLUICE_TOKEN"):
        return Connection(address, token, "environment")
    if sign_in := password_sign_in():
        return Connection(address, token_by_password(address, sign_in), "password")
    # A kept token is for the server that gave it, and for no other.
    if kept.get("token") and kept.get("url", "").rstrip("/") == address.rstrip("/"):
        return Connection(address, kept["token"], "login")
    raise NotConfigured(
        t("You are not signed in to {url}. Run: sluice login  (or set SLUICE_TOKEN)", url=address),
        code="no_token",
    )


def password_sign_in() -> PasswordSignIn | None:
    user = os.environ.get("MLSS_AUTH_USER", "")
    coded = os.environ.get("MLSS_AUTH_PASSWD", "")
    if not user or not coded:
        return None
    try:
        password = base64.b64decode(coded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise NotConfigured(
            t("MLSS_AUTH_PASSWD must be the password in base64."), code="bad_password_variable"
        ) from None
    return PasswordSignIn(user, password)


def token_by_password(url: str, sign_in: PasswordSignIn) -> str:
    """A token for a day, made once and kept: a password is not sent with every command."""
    mark = hashlib.sha256(f"{url}\n{sign_in.user}\n{sign_in.password}".encode()).hexdigest()
    now = datetime.now(UTC)
    kept = {
        key: row
        for key, row in _cached().items()
        if datetime.fromisoformat(row["expires_at"]) > now + SPARE
    }
    if mark in kept:
        return str(kept[mark]["token"])
    expires_at = (now + LIFETIME).isoformat()
    door = Door(url)
    try:
        made = door.json(
            "POST",
            "tokens",
            json={"name": device_name(), "scope": "write", "expires_at": expires_at},
            auth=(sign_in.user, sign_in.password),
        )
    finally:
        door.close()
    kept[mark] = {"token": made["token"], "expires_at": expires_at}
    write_private(cache_path(), json.dumps(kept))
    return str(made["token"])


def device_name() -> str:
    return f"sluice on {platform.node() or 'a computer'}"[:100]


def _cached() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(cache_path().read_text())
        return {key: row for key, row in found.items() if "token" in row and "expires_at" in row}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
