"""Every websocket × person: open, or the code with which it is closed (`access_table.py`)."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.testing import WebsocketCommunicator

from clusters.errors import ConnectFailed
from gateway.routing import websocket_urlpatterns
from tests.app.access_data import AccessData, make_access_data
from tests.app.access_table import SOCKET_ROWS, Row
from tests.app.core.test_events import close_worker_connections as close_worker_connections
from tests.app.core.test_events import make_communicator, session_of


def test_every_websocket_has_rows() -> None:
    ids = {"live": uuid.uuid4()}
    found = set()
    for row in SOCKET_ROWS:
        path = row.url.format(**ids).partition("?")[0].removeprefix("/")
        found.add(
            next(n for n, entry in enumerate(websocket_urlpatterns) if entry.pattern.match(path))
        )
    assert found == set(range(len(websocket_urlpatterns)))


async def open_and_read(socket: WebsocketCommunicator) -> str:
    """Return 101 if the websocket sends a frame, else the code with which it is closed."""
    accepted, code = await socket.connect(timeout=10)
    if not accepted:
        return str(code)
    output = await socket.receive_output(timeout=10)
    if output["type"] == "websocket.close":
        return str(output["code"])
    await socket.disconnect()
    return "101"


def list_sockets(data: AccessData, person: str, path: str) -> list[WebsocketCommunicator]:
    if person == "anonymous":
        return [make_communicator(path=path)]
    tokens = {"dead": ("revoked", "expired", "unknown")}.get(person, (person,))
    sockets = [
        make_communicator(origin="", path=path, token=data.secrets[name])
        for name in tokens
        if name in data.secrets
    ]
    if person in data.people:
        sockets.append(make_communicator(session_of(data.people[person]), path=path))
    return sockets


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("row", SOCKET_ROWS, ids=str)
async def test_websocket_per_person(
    settings: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    def refuse(*_names: Any) -> None:
        raise ConnectFailed("The cluster does not respond.")

    settings.UPLOAD_DIR = tmp_path / "uploads"
    monkeypatch.setattr("jobs.logs.reading.transport_for", refuse)
    data = await sync_to_async(make_access_data)()
    found = {}
    for person in row.expected:
        path = row.url.format(**data.ids)
        sockets = await sync_to_async(list_sockets)(data, person, path)
        found[person] = "/".join(sorted({await open_and_read(socket) for socket in sockets}))
    assert found == row.expected
