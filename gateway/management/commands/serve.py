"""`manage.py serve`: runs the web server and an engine as its child process. In production start them separately."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connections

from core.process import freeze_startup_objects

logger = logging.getLogger(__name__)

# Longest time for which a thread keeps the interpreter lock while others wait; Python's default is 5 ms. A line of
# a followed log passes through several threads, each of which may have to wait this long.
THREAD_SWITCH_INTERVAL_S = 0.001
# Delays before consecutive restarts of the engine; the last one repeats. After an engine that ran longer than
# ENGINE_STABLE_AFTER_S, the delays start again with the first.
ENGINE_RESTART_DELAYS_S = (1.0, 2.0, 5.0, 15.0)
ENGINE_STABLE_AFTER_S = 60.0


class EngineSupervisor:
    """Runs `manage.py engine` as a child process, so that it has its own interpreter lock; restarts it when it exits.

    The child exits at the end of its standard input, so it also exits when this process is killed.
    """

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor = threading.Thread(target=self._supervise, name="engine supervisor")

    def start(self) -> None:
        self._monitor.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
        if self._monitor.is_alive():
            self._monitor.join()

    def _supervise(self) -> None:
        restarts = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            exit_status = self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_at > ENGINE_STABLE_AFTER_S:
                restarts = 0
            delay_s = ENGINE_RESTART_DELAYS_S[min(restarts, len(ENGINE_RESTART_DELAYS_S) - 1)]
            restarts += 1
            logger.error(
                "the engine exited (%s) and is restarted in %s s",
                exit_status,
                delay_s,
                extra={"action": "engine_restart"},
            )
            self._stopping.wait(delay_s)

    def _run_once(self) -> int | str:
        """Run the engine until it exits. Return its exit code, or the error if it could not be started."""
        try:
            with self._lock:
                if self._stopping.is_set():
                    return ""
                # In a new session, so that Ctrl-C sends SIGINT only to this process, which then stops the engine.
                self._process = subprocess.Popen(
                    [sys.executable, str(settings.BASE_DIR / "manage.py"), "engine", "--until-eof"],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            return str(error)
        return self._process.wait()


class Command(BaseCommand):
    help = "Serve pages, API and websockets, and run an engine process."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument(
            "--no-engine", action="store_true", help="web only: engines run as `manage.py engine`"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        with contextlib.ExitStack() as stack:
            if not options["no_engine"]:
                engine = EngineSupervisor()
                stack.callback(engine.stop)
                engine.start()
            self._serve(options["host"], options["port"])

    def _serve(self, host: str, port: int) -> None:
        """Run the web server until SIGTERM or Ctrl-C, which Twisted's reactor handles."""
        # Imported here, because importing Daphne installs Twisted's asyncio reactor.
        from daphne.endpoints import build_endpoint_description_strings

        from gateway.asgi import application
        from gateway.server import BackpressureServer

        display_host = f"[{host}]" if ":" in host else host
        server = BackpressureServer(
            application=application,
            endpoints=build_endpoint_description_strings(host=host, port=port),
            server_name="sluice",
            # Without a proxy, clients could set X-Forwarded-For themselves.
            proxy_forwarded_address_header="X-Forwarded-For" if settings.BEHIND_TLS else None,
            ready_callable=lambda: self.stdout.write(
                f"Sluice answers at http://{display_host}:{port}/"
            ),
        )
        connections.close_all()
        freeze_startup_objects()
        sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
        server.run()
