"""Server URL and credentials: from the environment, else from the file that `sluice login` writes with mode 0600."""

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
from sluice.http import ApiSession
from sluice.messages import t

# Lifetime of a token created with a password in the environment. A token is replaced this margin before it expires.
TOKEN_LIFETIME = timedelta(days=1)
TOKEN_EXPIRY_MARGIN = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Connection:
    url: str
    token: str


def config_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "sluice" / "config.toml"


def cache_path() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sluice" / "tokens.json"


def read_config() -> dict[str, str]:
    path = config_path()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
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
    return {key: value for key, value in data.items() if isinstance(value, str)}


def write_config(values: Mapping[str, str]) -> Path:
    path = config_path()
    lines = ["# Written by “sluice login”. The token is a password: do not share this file."]
    # JSON strings are valid TOML basic strings.
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    write_private(path, "\n".join(lines) + "\n")
    return path


def write_private(path: Path, text: str) -> None:
    """Write the file atomically. It never exists with a mode other than 0600."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)


def resolve_connection(url: str | None = None) -> Connection:
    """Return the server's URL and the token. Raises NotConfigured, whose message says what to do."""
    stored = read_config()
    base_url = (
        url or os.environ.get("SLUICE_URL") or os.environ.get("DLAAS_URL") or stored.get("url")
    )
    if not base_url:
        raise NotConfigured(
            t(
                "The address of the Sluice server is not set. Run: sluice login  (or set SLUICE_URL)"
            ),
            code="no_url",
        )
    if token := os.environ.get("SLUICE_TOKEN"):
        return Connection(base_url, token)
    if credentials := read_password_credentials():
        return Connection(base_url, get_token_by_password(base_url, *credentials))
    # A stored token is sent only to the server that issued it.
    if stored.get("token") and stored.get("url", "").rstrip("/") == base_url.rstrip("/"):
        return Connection(base_url, stored["token"])
    raise NotConfigured(
        t("You are not signed in to {url}. Run: sluice login  (or set SLUICE_TOKEN)", url=base_url),
        code="no_token",
    )


def read_password_credentials() -> tuple[str, str] | None:
    """Return user and password from the variables of an older client: MLSS_AUTH_USER, MLSS_AUTH_PASSWD (base64)."""
    user = os.environ.get("MLSS_AUTH_USER", "")
    encoded = os.environ.get("MLSS_AUTH_PASSWD", "")
    if not user or not encoded:
        return None
    try:
        password = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise NotConfigured(
            t("MLSS_AUTH_PASSWD must be the password in base64."), code="bad_password_variable"
        ) from None
    return user, password


def get_token_by_password(url: str, user: str, password: str) -> str:
    """Create a token for one day and store it, so that not every command sends the password."""
    cache_key = hashlib.sha256(f"{url}\n{user}\n{password}".encode()).hexdigest()
    now = datetime.now(UTC)
    stored = {
        key: row
        for key, row in _read_token_cache().items()
        if datetime.fromisoformat(row["expires_at"]) > now + TOKEN_EXPIRY_MARGIN
    }
    if cache_key in stored:
        return str(stored[cache_key]["token"])
    expires_at = (now + TOKEN_LIFETIME).isoformat()
    session = ApiSession(url)
    try:
        created = session.json(
            "POST",
            "tokens",
            json={"name": device_name(), "scope": "write", "expires_at": expires_at},
            auth=(user, password),
        )
    finally:
        session.close()
    stored[cache_key] = {"token": created["token"], "expires_at": expires_at}
    write_private(cache_path(), json.dumps(stored))
    return str(created["token"])


def device_name() -> str:
    return f"sluice on {platform.node() or 'a computer'}"[:100]


def _read_token_cache() -> dict[str, dict[str, Any]]:
    try:
        data = json.loads(cache_path().read_text())
        return {key: row for key, row in data.items() if "token" in row and "expires_at" in row}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
