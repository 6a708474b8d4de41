"""`manage.py serve`: runs the web server and an engine; with `--front` also nginx and several web processes.

A web process of its own, for example under systemd, is `manage.py serve --no-engine --socket PATH`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from argparse import ArgumentParser
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.db import connection, connections

from core.process import exit_without_waiting, freeze_startup_objects
from gateway.front import UnsafeValue, render_front
from gateway.management.commands.front import build_front_options
from gateway.supervisor import Child, ChildSupervisor, stop_children

# Longest time for which a thread keeps the interpreter lock while others wait; Python's default is 5 ms. A line of
# a followed log passes through several threads, each of which may have to wait this long.
THREAD_SWITCH_INTERVAL_S = 0.001
# Time that running requests have to end after SIGTERM. Less than the supervisor's STOP_GRACE_S.
REQUEST_STOP_GRACE_S = 3.0
START_TIMEOUT_S = 120.0
MAX_PROCESSES_BY_DEFAULT = 4
MAX_SOCKET_PATH_BYTES = 107
# Connections that wait to be accepted. nginx answers 502 at once when a unix socket's queue is full; Twisted's default is
# 50. The kernel lowers it to net.core.somaxconn.
SOCKET_BACKLOG = 4096
MAX_OPEN_FILES = 65536


class Command(BaseCommand):
    help = "Serve pages, API and websockets, and run an engine process."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument(
            "--socket", default="", help="listen on this unix socket, behind nginx, not on a port"
        )
        parser.add_argument(
            "--no-engine", action="store_true", help="web only: engines run as `manage.py engine`"
        )
        parser.add_argument(
            "--front", action="store_true", help="run nginx in front of separate web processes"
        )
        parser.add_argument(
            "--processes",
            type=int,
            default=0,
            help="web processes behind nginx (1 with SQLite, else the number of cores, at most 4)",
        )
        parser.add_argument(
            "--until-eof", action="store_true", help="exit also at the end of standard input"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        raise_open_files_limit()
        engine = [] if options["no_engine"] else [ChildSupervisor(_manage_child("engine"))]
        if options["front"]:
            self._serve_behind_front(engine, options)
            return
        try:
            for supervisor in engine:
                supervisor.start()
            completed = self._serve(options)
        finally:
            stop_children(engine)
        if not completed:
            exit_without_waiting()

    # -- one web process ----------------------------------------------------------------------------------

    def _serve(self, options: dict[str, Any]) -> bool:
        """Run the web server until SIGTERM or Ctrl-C. Return False if requests are still running then."""
        # Imported here, because importing Daphne installs Twisted's asyncio reactor.
        from daphne.endpoints import build_endpoint_description_strings

        from gateway.asgi import application, http_handler
        from gateway.server import BackpressureServer

        host, port, socket_path = options["host"], options["port"], options["socket"]
        if socket_path:
            endpoints = [_unix_endpoint(Path(socket_path))]
            ready = f"A web process listens on {socket_path}"
        else:
            endpoints = build_endpoint_description_strings(host=host, port=port)
            ready = f"Sluice answers at {format_url(host, port)}"
        # Only nginx connects to a socket. On a port, clients could set X-Forwarded-For themselves without a proxy.
        behind_proxy = bool(socket_path) or settings.BEHIND_TLS
        server = BackpressureServer(
            application=application,
            endpoints=endpoints,
            server_name="sluice",
            proxy_forwarded_address_header="X-Forwarded-For" if behind_proxy else None,
            ready_callable=lambda: self.stdout.write(ready),
        )
        connections.close_all()
        freeze_startup_objects()
        sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
        if options["until_eof"]:
            _stop_at_eof()
        server.run()
        return http_handler.stop(REQUEST_STOP_GRACE_S)

    # -- nginx, web processes and engine -------------------------------------------------------------------

    def _serve_behind_front(self, engine: list[ChildSupervisor], options: dict[str, Any]) -> None:
        """Run nginx, the web processes and the engine as children until SIGTERM or Ctrl-C."""
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: stop.set())
        _check_port(options["host"], options["port"])
        count = options["processes"] or default_process_count()
        connections.close_all()
        directory = _prepare_front_dir()
        sockets = [directory / f"web-{number}.sock" for number in range(1, count + 1)]
        nginx = ChildSupervisor(
            Child("nginx", _nginx_argv(directory, sockets, options["host"], options["port"]))
        )
        web = [
            ChildSupervisor(_manage_child("serve", "--no-engine", "--socket", str(path)))
            for path in sockets
        ]
        try:
            for supervisor in (*web, *engine):
                supervisor.start()
            self._wait_until(stop, lambda: all(_accepts(path) for path in sockets))
            nginx.start()
            self._wait_until(stop, lambda: _is_healthy(options["host"], options["port"], nginx))
            if not stop.is_set():
                self.stdout.write(
                    f"Sluice answers at {format_url(options['host'], options['port'])}"
                )
                self.stdout.flush()
            stop.wait()
        finally:
            stop_children([nginx, *web, *engine])
            shutil.rmtree(directory, ignore_errors=True)

    @staticmethod
    def _wait_until(stop: threading.Event, condition: Any) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not stop.is_set() and not condition():
            if time.monotonic() > deadline:
                raise CommandError(f"Sluice did not start within {START_TIMEOUT_S:.0f} s.")
            stop.wait(0.1)


def format_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def default_process_count() -> int:
    """One with SQLite, which has one writer at a time; with PostgreSQL the number of cores, at most four."""
    if connection.vendor == "sqlite":
        return 1
    return min(os.cpu_count() or 1, MAX_PROCESSES_BY_DEFAULT)


def raise_open_files_limit() -> None:
    """Allow as many open files as the system allows: each websocket needs one or two."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _manage_child(command: str, *arguments: str) -> Child:
    argv = [sys.executable, str(settings.BASE_DIR / "manage.py"), command]
    name = "engine" if command == "engine" else "web process"
    # By default glibc has eight memory pools per core, each of which keeps memory that threads have freed.
    environment = {"MALLOC_ARENA_MAX": "2", **os.environ}
    return Child(name, [*argv, *arguments, "--until-eof"], environment, until_eof=True)


def _unix_endpoint(path: Path) -> str:
    """Return Twisted's description of the socket, which nginx's group may use; removes one that a process left."""
    if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise CommandError(
            f"The path of a unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes; {path} is longer."
        )
    if path.is_socket() and not _accepts(path):
        path.unlink()
    escaped = str(path).replace("\\", "\\\\").replace(":", "\\:")
    return f"unix:{escaped}:mode=660:backlog={SOCKET_BACKLOG}"


def _stop_at_eof() -> None:
    """Send this process SIGTERM at the end of standard input."""

    def wait() -> None:
        # os.read instead of sys.stdin: at exit Python aborts while another thread reads sys.stdin.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="stdin").start()


def _prepare_front_dir() -> Path:
    directory = Path(settings.SLUICE_HOME) / "front"
    if any(_accepts(path) for path in directory.glob("*.sock")):
        raise CommandError(f"Another `serve --front` runs in {settings.SLUICE_HOME}.")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, mode=0o700)
    return directory


def _nginx_argv(directory: Path, sockets: list[Path], host: str, port: int) -> list[str]:
    """Write the configuration and return the command line of nginx."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
    program = shutil.which("nginx", path=path)
    if program is None:
        raise CommandError(
            "nginx is not installed. Install the package nginx-light, or leave out --front."
        )
    options = build_front_options(
        listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        web=[f"unix:{path}" for path in sockets],
        server_names=["_"],
        private_dir=directory,
        user=pwd.getpwuid(os.getuid()).pw_name if os.getuid() == 0 else "",
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    configuration = directory / "nginx.conf"
    try:
        configuration.write_text(render_front(options))
    except UnsafeValue as error:
        raise CommandError(str(error)) from None
    return [program, "-c", str(configuration), "-e", "stderr", "-p", str(directory)]


def _check_port(host: str, port: int) -> None:
    """Report a port in use before anything is started; nginx would retry for seconds."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandError(f"Port {port} on {host} cannot be used: {error.strerror}.") from None


def _accepts(path: Path) -> bool:
    """Whether a process accepts connections on the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        with contextlib.suppress(OSError):
            probe.connect(str(path))
            return True
    return False


def _is_healthy(host: str, port: int, nginx: ChildSupervisor) -> bool:
    if nginx.exit_status is not None:
        raise CommandError("nginx did not start. Its error is in the log above.")
    with contextlib.suppress(OSError, HTTPException):
        http = HTTPConnection("127.0.0.1" if host in ("", "0.0.0.0") else host, port, timeout=5)  # noqa: S104
        http.request("GET", "/healthz")
        return http.getresponse().status == 200
    return False
