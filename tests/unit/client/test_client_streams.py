"""Logs and job events over real websockets that disconnect: no byte lost or repeated, no state change missed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from websockets.sync.server import ServerConnection, serve

import sluice
from sluice import events, logs, sockets
from sluice.http import ApiSession

ID = "11111111-1111-4111-8111-111111111111"
TEXT = ("Grüße, 世界 🚀\n" * 400).encode()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (logs, events):
        monkeypatch.setattr(module, "backoff_s", lambda tries: 0.01)
    monkeypatch.setattr(logs, "POLL_S", 0.01)
    monkeypatch.setattr(events, "POLL_MIN_S", 0.01)


@contextmanager
def socket_server(handler: Callable[[ServerConnection], None]) -> Iterator[str]:
    with serve(handler, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def job_transport(*states: str) -> httpx.MockTransport:
    """Responds with the job in each state in turn, then always in the last one."""
    remaining_states = list(states)

    def respond(request: httpx.Request) -> httpx.Response:
        state = remaining_states.pop(0) if len(remaining_states) > 1 else remaining_states[0]
        return httpx.Response(200, json={"id": ID, "state": state, "attempt": 1})

    return httpx.MockTransport(respond)


def test_log_resumes_at_its_offset_after_each_disconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "language", lambda: "zh-hans")
    offsets: list[int] = []
    tokens: list[str] = []

    def handler(socket: ServerConnection) -> None:
        assert socket.request is not None
        address = urlsplit(socket.request.path)
        query = parse_qs(address.query)
        assert address.path == f"/ws/jobs/{ID}/logs/a%2Fb/3"
        assert query["lossless"] == ["1"]
        tokens.append(socket.request.headers["Authorization"])
        assert socket.request.headers["Accept-Language"] == "zh-hans"
        offset = int(query["offset"][0])
        offsets.append(offset)
        socket.send(json.dumps({"type": "log", "offset": offset, "size": len(TEXT)}))
        # Disconnects in the middle of a UTF-8 character.
        end = min(len(TEXT), offset + 1001)
        for start in range(offset, end, 7):
            socket.send(TEXT[start : min(start + 7, end)])
        if end < len(TEXT):
            socket.close(1011)
        else:
            socket.send(json.dumps({"type": "end", "state": "succeeded", "exit_code": 0}))

    with socket_server(handler) as url:
        session = ApiSession(url, "slc_x", transport=job_transport("RUNNING"))
        stream = logs.LogStream(session, ID, "a/b", 3, follow=True)
        assert "".join(stream.text).encode() == TEXT
        assert stream.offset == len(TEXT)
        assert stream.verdict == {"state": "succeeded", "exit_code": 0}
        session.close()
    assert offsets == list(range(0, len(TEXT), 1001))
    assert set(tokens) == {"Bearer slc_x"}


def test_truncated_log_restarts_and_waiting_is_reported() -> None:
    waiting_reasons: list[str] = []

    def handler(socket: ServerConnection) -> None:
        for frame in (
            {"type": "waiting", "offset": 0, "reason": "not yet"},
            {"type": "log", "offset": 0, "size": 3},
        ):
            socket.send(json.dumps(frame))
        socket.send(b"old")
        socket.send(json.dumps({"type": "truncated"}))
        socket.send(b"n")
        socket.send(json.dumps({"type": "end", "state": "failed", "exit_code": 1}))

    with socket_server(handler) as url:
        session = ApiSession(url, "t", transport=job_transport("RUNNING"))
        stream = logs.LogStream(session, ID, "a", 0, follow=True, on_wait=waiting_reasons.append)
        assert stream.read() == b"oldn"
        assert stream.offset == 1
        session.close()
    assert waiting_reasons == ["not yet"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [(4401, sluice.Unauthorized), (4403, sluice.Forbidden), (4404, sluice.NotFound)],
)
def test_permanent_close_codes_raise(code: int, kind: type[sluice.SluiceError]) -> None:
    with socket_server(lambda socket: socket.close(code)) as url:
        session = ApiSession(url, "t", transport=job_transport("RUNNING"))
        with pytest.raises(kind):
            logs.LogStream(session, ID, "a", 0, follow=True).read()
        with pytest.raises(kind):
            list(events.JobWatcher(session, ID))
        session.close()


def test_stream_raises_unreachable_after_repeated_disconnects() -> None:
    with socket_server(lambda socket: socket.close(1011)) as url:
        session = ApiSession(url, "t", transport=job_transport("RUNNING"))
        with pytest.raises(sluice.Unreachable):
            logs.LogStream(session, ID, "a", 0, follow=True).read()
        session.close()


def rest_log_transport(data: bytes, job: dict[str, Any]) -> httpx.MockTransport:
    """REST only, as behind a proxy without websockets; the log grows with every request."""
    progress = {"to": 0}

    def respond(request: httpx.Request) -> httpx.Response:
        if "/logs/" not in request.url.path:
            state = "COMPLETED" if progress["to"] >= len(data) else "RUNNING"
            return httpx.Response(200, json={**job, "state": state})
        progress["to"] = min(len(data), progress["to"] + 999)
        offset = int(request.url.params["offset"])
        size = progress["to"]
        complete = "1" if size == len(data) else "0"
        headers = {"X-Log-Offset": str(offset), "X-Log-Size": str(size)}
        headers["X-Log-Complete"] = complete
        return httpx.Response(200, content=data[offset:size], headers=headers)

    return httpx.MockTransport(respond)


def test_log_falls_back_to_rest_polling() -> None:
    def refuse(socket: ServerConnection, request: Any) -> Any:
        return socket.respond(403, "no websockets here\n")

    with serve(lambda socket: None, "127.0.0.1", 0, process_request=refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        session = ApiSession(url, "t", transport=rest_log_transport(TEXT, {"id": ID}))
        assert logs.LogStream(session, ID, "a", 0, follow=True).read() == TEXT
        states = [job.state for job in events.JobWatcher(session, ID)]
        assert states == ["COMPLETED"]
        server.shutdown()
        thread.join()
        session.close()


def test_read_without_follow_ends_at_current_size() -> None:
    session = ApiSession("http://server", "t", transport=rest_log_transport(b"x" * 500, {"id": ID}))
    stream = logs.LogStream(session, ID, "a", 0)
    assert stream.read() == b"x" * 500
    assert list(logs.LogStream(session, ID, "a", 0).lines()) == ["x" * 500]


def test_lines_are_independent_of_chunk_boundaries() -> None:
    class ByteByByteStream(logs.LogStream):
        def __iter__(self) -> Iterator[bytes]:
            data = "eins\nzwéi\r\n\ndrei".encode()
            return (data[index : index + 1] for index in range(len(data)))

    stream = ByteByByteStream(ApiSession("http://server", "t"), ID, "a", 0)
    assert list(stream.lines()) == ["eins", "zwéi", "", "drei"]


def test_watcher_yields_each_change_once() -> None:
    def handler(socket: ServerConnection) -> None:
        socket.send(json.dumps({"type": "hello", "number": 1}))
        other = {"number": 2, "job": "another", "kind": "state"}
        socket.send(json.dumps({"type": "events", "events": [other]}))
        for number in (3, 4, 5):
            mine = {"number": number, "job": ID, "kind": "state"}
            socket.send(json.dumps({"type": "events", "events": [mine]}))
        socket.close(1011)

    with socket_server(handler) as url:
        session = ApiSession(
            url, "t", transport=job_transport("QUEUED", "RUNNING", "RUNNING", "RUNNING", "FAILED")
        )
        assert [job.state for job in events.JobWatcher(session, ID)] == [
            "QUEUED",
            "RUNNING",
            "FAILED",
        ]
        session.close()


def test_wait_raises_after_its_timeout() -> None:
    def handler(socket: ServerConnection) -> None:
        socket.send(json.dumps({"type": "hello", "number": 1}))
        socket.recv()

    with socket_server(handler) as url:
        client = sluice.Client(url, "t", transport=job_transport("RUNNING"))
        with pytest.raises(sluice.WaitTimeout, match="continues"):
            client.wait(ID, timeout=0.2)
        client.close()
