"""Opens websockets with the token, and distinguishes permanent from temporary failures."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from websockets.exceptions import InvalidHandshake, InvalidStatus, WebSocketException
from websockets.sync.client import connect

from sluice.errors import Forbidden, NotFound, SluiceError, Unauthorized
from sluice.http import USER_AGENT, ApiSession
from sluice.messages import language, t

if TYPE_CHECKING:
    from collections.abc import Mapping

    from websockets.sync.client import ClientConnection

OPEN_TIMEOUT_S = 15.0
# Close codes of the server after which a reconnect would fail too.
CLOSE_SIGNED_OUT, CLOSE_NOT_ALLOWED, CLOSE_NOT_FOUND = 4401, 4403, 4404


class SocketLost(Exception):
    """The connection failed or was lost; a reconnect may succeed. Data already read is valid."""


class WebSocketUnavailable(Exception):
    """A proxy in front of the server blocks websockets."""


def open_socket(session: ApiSession, path: str, params: Mapping[str, object]) -> ClientConnection:
    """Open a websocket. Raises SocketLost for a temporary failure, WebSocketUnavailable if only HTTP can be used."""
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
                "Accept-Language": language(),
            },
            user_agent_header=USER_AGENT,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=2,
            max_size=16 * 1024 * 1024,
            ssl=context,
        )
    except InvalidStatus as error:
        if error.response.status_code in (429, 500, 502, 503, 504):
            raise SocketLost from error
        # 401 and 403 may come from the server or from a proxy; the HTTP requests that follow show which.
        raise WebSocketUnavailable from error
    except InvalidHandshake as error:
        raise WebSocketUnavailable from error
    except (OSError, EOFError, WebSocketException) as error:
        raise SocketLost from error


def error_for_close_code(code: int) -> SluiceError | None:
    """Return the error for a close code after which a reconnect would fail too; None if a reconnect may succeed."""
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
