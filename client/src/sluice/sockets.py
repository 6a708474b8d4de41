"""Websockets to the server: opened with the token, failures told apart into "not allowed" and "try again"."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from sluice.errors import Forbidden, NotFound, SluiceError, Unauthorized
from sluice.http import Door
from sluice.messages import language, t
from sluice.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from websockets.sync.client import ClientConnection

OPEN_TIMEOUT_S = 15.0
# The server's own close codes (its pages know them too).
SIGNED_OUT, NOT_ALLOWED, NO_SUCH, TOO_SLOW, TOO_MANY = 4401, 4403, 4404, 4408, 4429


class SocketLost(Exception):
    """The connection broke or could not be made; what was read stays good."""


class NoSockets(Exception):
    """Something between us and the server lets no websockets through."""


def open_socket(door: Door, path: str, params: Mapping[str, object]) -> ClientConnection:
    """Raises SluiceError for good, SocketLost for a while, NoSockets when only HTTP gets through."""
    query = urlencode({key: value for key, value in params.items() if value is not None})
    address = f"{door.socket_url}{path}{'?' + query if query else ''}"
    context = None
    if address.startswith("wss:"):
        context = ssl.create_default_context(
            cafile=door.verify if isinstance(door.verify, str) else None
        )
        if door.verify is False:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return connect(
            address,
            additional_headers={
                "Authorization": f"Bearer {door.token}",
                "Accept-Language": "zh-hans" if language() == "zh" else "en",
            },
            user_agent_header=f"sluice-python/{VERSION}",
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=2,
            max_size=16 * 1024 * 1024,
            ssl=context,
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status in (401, 403):
            # Refused before the handshake: the token, or a proxy. HTTP can tell which.
            raise NoSockets from error
        if status in (429, 500, 502, 503, 504):
            raise SocketLost from error
        raise NoSockets from error
    except InvalidHandshake as error:
        raise NoSockets from error
    except (OSError, EOFError, WebSocketException) as error:
        raise SocketLost from error


def refusal(code: int) -> SluiceError | None:
    """A close code that will not change by coming back."""
    if code == SIGNED_OUT:
        return Unauthorized(
            t("This token is not known, was revoked or has expired. Run: sluice login"),
            code="token_invalid",
            status=401,
        )
    if code == NOT_ALLOWED:
        return Forbidden(t("You may no longer see this."), code="forbidden", status=403)
    if code == NO_SUCH:
        return NotFound(
            t("There is no such job or log, or you may not see it."), code="not_found", status=404
        )
    return None
