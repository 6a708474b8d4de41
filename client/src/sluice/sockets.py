"""Opens websockets to the server with the token; separates permanent from temporary failures."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from sluice.errors import Forbidden, NotFound, SluiceError, Unauthorized
from sluice.http import ApiSession
from sluice.messages import language, t
from sluice.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from websockets.sync.client import ClientConnection

OPEN_TIMEOUT_S = 15.0
# Close codes of the server.
CLOSE_SIGNED_OUT, CLOSE_NOT_ALLOWED, CLOSE_NOT_FOUND, CLOSE_TOO_SLOW, CLOSE_TOO_MANY = (
    4401,
    4403,
    4404,
    4408,
    4429,
)


class SocketLost(Exception):
    """The connection failed or was lost; data already read is valid."""


class WebSocketUnavailable(Exception):
    """A proxy in front of the server blocks websockets."""


def open_socket(session: ApiSession, path: str, params: Mapping[str, object]) -> ClientConnection:
    """Raises SluiceError (permanent), SocketLost (temporary) or WebSocketUnavailable (only HTTP works)."""
    query = urlencode({key: value for key, value in params.items() if value is not None})
    address = f"{session.socket_url}{path}{'?' + query if query else ''}"
    context = None
    if address.startswith("wss:"):
        context = ssl.create_default_context(
            cafile=session.verify if isinstance(session.verify, str) else None
        )
        if session.verify is False:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return connect(
            address,
            additional_headers={
                "Authorization": f"Bearer {session.token}",
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
            # Rejected before the handshake, by the server or by a proxy; an HTTP request shows which.
            raise WebSocketUnavailable from error
        if status in (429, 500, 502, 503, 504):
            raise SocketLost from error
        raise WebSocketUnavailable from error
    except InvalidHandshake as error:
        raise WebSocketUnavailable from error
    except (OSError, EOFError, WebSocketException) as error:
        raise SocketLost from error


def error_for_close_code(code: int) -> SluiceError | None:
    """The error for a close code that a reconnect would meet again; None: reconnect."""
    if code == CLOSE_SIGNED_OUT:
        return Unauthorized(
            t("The token is unknown, revoked or expired. Run: sluice login"),
            code="token_invalid",
            status=401,
        )
    if code == CLOSE_NOT_ALLOWED:
        return Forbidden(t("You may no longer see this."), code="forbidden", status=403)
    if code == CLOSE_NOT_FOUND:
        return NotFound(
            t("The job or log does not exist, or you may not see it."), code="not_found", status=404
        )
    return None
