"""nginx in front of web processes: `manage.py serve --front`, and the generated configuration with test applications."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.front import FrontOptions, render_front
from gateway.management.commands.front import list_error_texts
from tests.process.test_serve_command import child_pids, is_alive, manage, wait_until
from tests.sluice_server import PROJECT, free_port

pytestmark = pytest.mark.slow

MIB = 1024**2
NGINX = "/usr/sbin/nginx"


def request(
    port: int, method: str, path: str, body: object = None, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, names)  # type: ignore[arg-type]
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def send_head(port: int, head: str) -> str:
    """Send the head of a request without a body and return the answer, which must have a Content-Length."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(head.encode())
        response = http.client.HTTPResponse(client)
        response.begin()
        body = response.read().decode()
    return f"{response.status}\n{response.headers}\n{body}"


def send_raw(port: int, data: bytes, timeout_s: float = 30) -> bytes:
    """Send the bytes and return the answer up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as client:
        client.sendall(data)
        answer = b""
        try:
            while chunk := client.recv(65536):
                answer += chunk
        except ConnectionResetError:
            pass
    return answer


# -- the product ---------------------------------------------------------------------------------------------


@dataclass
class Site:
    port: int
    home: Path
    process: subprocess.Popen[bytes]

    def log(self) -> str:
        return (self.home / "log").read_text()

    def web_pids(self) -> list[int]:
        return [pid for pid in child_pids(self.process.pid) if "--socket" in command_line(pid)]

    def bodies(self) -> list[Path]:
        return [path for path in (self.home / "front" / "bodies").rglob("*") if path.is_file()]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


@pytest.fixture(scope="module")
def prepared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with database, demo users and static files, to be copied."""
    home = tmp_path_factory.mktemp("prepared")
    for arguments in (("migrate", "-v", "0"), ("collectstatic", "--no-input"), ("demo",)):
        argv, env = manage(home, *arguments)
        env["SLUICE_STATIC_FROM_SOURCE"] = "0"
        subprocess.run(argv, cwd=PROJECT, env=env, check=True, stdout=subprocess.DEVNULL)
    return home


def start_site(home: Path, *options: str) -> Site:
    port = free_port()
    argv, env = manage(home, "serve", "--front", "--port", str(port), *options)
    env |= {"SLUICE_STATIC_FROM_SOURCE": "0", "SLUICE_UPLOAD_MAX_BYTES": str(300 * MIB)}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=PROJECT, env=env, stdout=log, stderr=log)
    site = Site(port, home, process)
    wait_until(lambda: "answers at http" in site.log())
    return site


def copy_database(source: Path, target: Path) -> None:
    for name in ("db.sqlite3", "secret_key"):
        shutil.copy(source / name, target / name)


def end(site: Site) -> None:
    site.process.terminate()
    try:
        site.process.wait(30)
    except subprocess.TimeoutExpired:
        site.process.kill()
        site.process.wait()


@pytest.fixture(scope="module")
def site(prepared_home: Path) -> Iterator[Site]:
    running = start_site(prepared_home)
    yield running
    end(running)


@pytest.fixture(scope="module")
def token(site: Site) -> str:
    lines = (site.home / "demo-passwords").read_text().splitlines()
    password = dict(line.split() for line in lines)["alice"]
    login = base64.b64encode(f"alice:{password}".encode()).decode()
    response, body = request(
        site.port,
        "POST",
        "/api/v1/tokens",
        json.dumps({"name": "t", "scope": "write"}),
        Authorization=f"Basic {login}",
        Content_Type="application/json",
    )
    assert response.status == 201, body
    return str(json.loads(body)["token"])


def test_static_files_are_compressed_and_cached(site: Site) -> None:
    _response, page = request(site.port, "GET", "/login")
    address = re.search(rb'href="(/static/[^"]+\.css)"', page)
    assert address
    path = address.group(1).decode()
    response, body = request(site.port, "GET", path, Accept_Encoding="gzip")
    assert response.status == 200
    assert response.headers["Content-Encoding"] == "gzip"
    assert response.headers["Content-Type"] == "text/css"
    assert response.headers["Cache-Control"] == "public, max-age=31536000, immutable"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    _response, plain = request(site.port, "GET", path)
    assert gzip.decompress(body) == plain
    for outside in ("/static/../db.sqlite3", "/static/%2e%2e/db.sqlite3", "/static../db.sqlite3"):
        response, body = request(site.port, "GET", outside)
        assert response.status in (400, 404), outside
        assert b"SQLite" not in body


@pytest.mark.parametrize(
    ("path", "length"),
    [
        ("/api/v1/templates", 3 * MIB),
        ("/api/v1/jobs", 400 * MIB),
        ("/api/v1/jobs/1/stop", 3 * MIB),
        ("/login", 10**12),
    ],
)
def test_oversized_body_is_refused_before_upload(site: Site, path: str, length: int) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n"
    answer = send_head(site.port, head + "Accept-Language: zh-CN\r\n\r\n")
    assert answer.startswith("413\n")
    assert "请求体过大，超出此地址的限制。" in answer
    assert ('"code": "too_large"' in answer) == path.startswith("/api/")


@pytest.mark.parametrize(
    "credentials", ["", "Authorization: Bearer slc_bad\r\n", "Cookie: sessionid=x\r\n"]
)
@pytest.mark.parametrize("framing", ["Content-Length: 50000000", "Transfer-Encoding: chunked"])
def test_unauthenticated_upload_is_refused_early(
    site: Site, credentials: str, framing: str
) -> None:
    head = f"POST /api/v1/uploads?filename=a HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n"
    answer = send_head(site.port, head + credentials + "\r\n")
    assert answer.startswith("401\n")
    assert answer.count("WWW-Authenticate: Bearer") == 1
    assert '"code": "not_authenticated"' in answer
    assert not site.bodies()


def test_large_upload_is_not_held_in_memory(site: Site, token: str) -> None:
    def peak_kib() -> int:
        (pid,) = site.web_pids()
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert found
        return int(found.group(1))

    def upload(blocks: int) -> tuple[int, bytes]:
        block = os.urandom(MIB)
        response, body = request(
            site.port,
            "POST",
            "/api/v1/uploads?filename=code.tar.gz",
            (block for _ in range(blocks)),
            Authorization=f"Bearer {token}",
            Content_Type="application/octet-stream",
            Content_Length=str(blocks * MIB),
        )
        return response.status, body

    status, body = upload(1)
    assert (status, json.loads(body)["code"]) == (422, "archive_refused"), body
    before = peak_kib()
    assert upload(200)[0] == 422
    assert peak_kib() - before < 40 * 1024
    assert not site.bodies()


def test_killed_web_process_is_restarted(site: Site) -> None:
    (first,) = site.web_pids()
    os.kill(first, signal.SIGKILL)
    response, body = request(site.port, "GET", "/api/v1/jobs")
    if response.status != 401:  # between the exit and the restart
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert json.loads(body)["code"] == "unavailable"
    wait_until(lambda: request(site.port, "GET", "/api/v1/jobs")[0].status == 401)
    assert site.web_pids() != [first]


def test_second_site_in_the_same_directory_is_refused(site: Site) -> None:
    argv, env = manage(site.home, "serve", "--front", "--port", str(free_port()))
    done = subprocess.run(argv, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Another `serve --front` runs in" in done.stderr
    assert request(site.port, "GET", "/healthz")[0].status == 200


def test_port_in_use_is_reported(tmp_path: Path, prepared_home: Path) -> None:
    copy_database(prepared_home, tmp_path)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        argv, env = manage(tmp_path, "serve", "--front", "--no-engine", "--port", str(port))
        done = subprocess.run(
            argv, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert f"Port {port} on 127.0.0.1 cannot be used: Address already in use." in done.stderr


def test_site_stops_in_bounded_time_although_a_request_hangs(
    tmp_path: Path, prepared_home: Path
) -> None:
    """The request waits for the lock of SQLite, for which the web process has no checkpoint."""
    copy_database(prepared_home, tmp_path)
    site = start_site(tmp_path, "--no-engine")
    children = child_pids(site.process.pid)
    database = sqlite3.connect(tmp_path / "db.sqlite3", isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    try:
        with socket.create_connection(("127.0.0.1", site.port)) as client:
            client.sendall(
                b"GET /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer slc_x\r\n\r\n"
            )
            time.sleep(1)
            site.process.terminate()
            assert site.process.wait(15) == 0
    finally:
        database.rollback()
        database.close()
    assert not any(is_alive(pid) for pid in children)


def test_children_exit_when_the_parent_is_killed(tmp_path: Path, prepared_home: Path) -> None:
    copy_database(prepared_home, tmp_path)
    site = start_site(tmp_path)
    children = child_pids(site.process.pid)
    assert len(children) == 3  # nginx, one web process, the engine
    site.process.kill()
    site.process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in children))


# -- the configuration, with applications that show what they receive -----------------------------------------

APPLICATION = """
import asyncio, json, sys
sys.path.insert(0, {project!r})
from gateway.server import BackpressureServer

async def application(scope, receive, send):
    if scope["type"] == "websocket":
        await receive()
        await send({{"type": "websocket.accept"}})
        await send({{"type": "websocket.send", "text": {name!r}}})
        await send({{"type": "websocket.close"}})
        return
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({{"type": "http.response.start", "status": 200, "headers": []}})
    if scope["path"] == "/flood":
        sent = 0
        for _ in range(1024):
            await send({{"type": "http.response.body", "body": b"x" * 65536, "more_body": True}})
            sent += 65536
            open({sent!r}, "w").write(str(sent))
        await send({{"type": "http.response.body", "body": b""}})
        return
    headers = {{key.decode(): value.decode() for key, value in scope["headers"]}}
    body = {{"name": {name!r}, "client": scope["client"], "root_path": scope["root_path"],
             "headers": headers, "size": size}}
    await send({{"type": "http.response.body", "body": json.dumps(body).encode()}})

BackpressureServer(
    application, endpoints=["unix:{socket}"], proxy_forwarded_address_header="X-Forwarded-For",
    ready_callable=lambda: print("ready", flush=True),
).run()
"""


@pytest.fixture(scope="module")
def front_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("front")


@pytest.fixture(scope="module")
def front(front_dir: Path) -> Iterator[int]:
    """The port of nginx in front of two applications, `web-1` and `web-2`."""
    directory, port = front_dir, free_port()
    processes = []
    for name in ("web-1", "web-2"):
        program = APPLICATION.format(
            project=str(PROJECT),
            name=name,
            socket=str(directory / f"{name}.sock"),
            sent=str(directory / "sent"),
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        processes.append(process)
    options = FrontOptions(
        listen=f"127.0.0.1:{port}",
        web=[f"unix:{directory}/{name}.sock" for name in ("web-1", "web-2")],
        server_names=["_"],
        max_body_bytes=2 * MIB,
        max_upload_bytes=100 * MIB,
        request_timeout_s=60,
        texts=list(list_error_texts()),
        private_dir=directory,
        user="root" if os.getuid() == 0 else "",
        max_open_files=1024,
    )
    (directory / "nginx.conf").write_text(render_front(options))
    argv = [NGINX, "-c", str(directory / "nginx.conf"), "-e", "stderr"]
    processes.append(subprocess.Popen(argv))
    wait_until(lambda: is_listening(port))
    yield port
    for process in processes:
        process.terminate()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_client_cannot_forge_address_and_root_path(front: int) -> None:
    _response, body = request(
        front,
        "GET",
        "/",
        X_Forwarded_For="10.9.9.9",
        X_Forwarded_Proto="https",
        X_Forwarded_Host="evil.example",
        X_Real_IP="10.9.9.9",
        Forwarded="for=10.9.9.9",
        Daphne_Root_Path="/evil",
    )
    seen = json.loads(body)
    assert seen["client"][0] == "127.0.0.1"
    assert seen["root_path"] == ""
    assert seen["headers"]["x-forwarded-for"] == "127.0.0.1"
    assert seen["headers"]["x-forwarded-proto"] == "http"
    assert not {"x-forwarded-host", "x-real-ip", "forwarded"} & set(seen["headers"])


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Transfer-Encoding: gzip, chunked",
        "Content-Length: +5",
        "Bad Name: x",
    ],
)
def test_ambiguous_requests_are_refused(front: int, head: str) -> None:
    data = (
        f"POST / HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    answer = send_raw(front, data.encode())
    assert re.match(rb"HTTP/1\.1 (400|501) ", answer), answer
    assert answer.count(b"HTTP/1.1 ") == 1


def read_websocket(port: int, path: str) -> str:
    """Return the first text frame of the websocket."""
    key = base64.b64encode(os.urandom(16)).decode()
    head = (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(head.encode())
        answer = b""
        while b"web-" not in answer:
            chunk = client.recv(65536)
            assert chunk, answer
            answer += chunk
    return answer[answer.index(b"web-") :][:5].decode()


def test_viewers_of_one_log_reach_one_web_process(front: int) -> None:
    by_path = {}
    for job in range(12):
        path = f"/ws/jobs/{job}/logs/worker/0"
        names = {read_websocket(front, f"{path}?offset={viewer}") for viewer in range(6)}
        assert len(names) == 1
        by_path[path] = names.pop()
    assert set(by_path.values()) == {"web-1", "web-2"}
    # Other websockets and requests are spread over all processes.
    assert {read_websocket(front, "/ws/events") for _ in range(10)} == {"web-1", "web-2"}
    answers = {json.loads(request(front, "GET", "/")[1])["name"] for _ in range(10)}
    assert answers == {"web-1", "web-2"}


def test_download_waits_for_a_client_that_does_not_read(front: int, front_dir: Path) -> None:
    sent = front_dir / "sent"
    with socket.create_connection(("127.0.0.1", front), timeout=30) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        wait_until(sent.exists)
        previous, current = -1, 0
        while current != previous:
            time.sleep(0.5)
            previous, current = current, int(sent.read_text() or -1)
        assert 0 < current < 32 * MIB
        received = 0
        while chunk := client.recv(1 << 20):
            received += len(chunk)
    assert received >= 1024 * 65536


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"POST /api/v1/templates HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
    ],
)
def test_client_that_stops_sending_is_disconnected(front: int, data: bytes) -> None:
    answer = send_raw(front, data, timeout_s=60)  # a timeout of this socket would raise
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("tls", [False, True])
def test_nginx_accepts_the_printed_configuration(tmp_path: Path, tls: bool) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = []
    if tls:
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-subj",
                "/CN=x",
                "-keyout",
                str(key),
                "-out",
                str(certificate),
            ],
            check=True,
            capture_output=True,
        )
        options = ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    argv, env = manage(
        tmp_path,
        *("front", "--print", "--server-name", "sluice.lab.example", *options),
        *("--web", "unix:/run/sluice/a.sock", "--web", "127.0.0.1:8001"),
        *("--access-log", str(tmp_path / "access.log")),
    )
    printed = subprocess.run(
        argv, cwd=PROJECT, env=env, check=True, capture_output=True, text=True
    ).stdout
    (tmp_path / "site.conf").write_text(printed)
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}}\nhttp {{ include {tmp_path}/site.conf; }}\n"
    )
    done = subprocess.run(
        [NGINX, "-t", "-c", str(tmp_path / "nginx.conf"), "-e", "stderr"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr
