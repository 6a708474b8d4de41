"""`manage.py serve`: the web server and an engine beside it, for one machine. In production run them apart."""

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

# How long a thread may compute while another one waits for its turn. Python's own 5 ms are spent at
# every hop of a log line on its way through the threads.
THREAD_SWITCH_INTERVAL_S = 0.001
# The engine is started again after the first of these, and ever later while it does not stay.
RESTART_DELAYS_S = (1.0, 2.0, 5.0, 15.0)
STABLE_AFTER_S = 60.0


class EngineSupervisor:
    """`manage.py engine` as a process of its own: threads of one process take turns at Python, processes do not.

    It ends when its input does, so soon after this process, however that ends; if it ends by itself, it is
    started again.
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
            started = time.monotonic()
            exit_status = self._run_once()
            if self._stopping.is_set():
                return
            if time.monotonic() - started > STABLE_AFTER_S:
                restarts = 0
            pause_s = RESTART_DELAYS_S[min(restarts, len(RESTART_DELAYS_S) - 1)]
            restarts += 1
            logger.error(
                "the engine ended by itself (%s) and is started again in %s s",
                exit_status,
                pause_s,
                extra={"action": "engine_restart"},
            )
            self._stopping.wait(pause_s)

    def _run_once(self) -> int | str:
        """Its exit code, or why it could not be started."""
        try:
            with self._lock:
                if self._stopping.is_set():
                    return ""
                # A session of its own: a terminal's Ctrl-C is for the server, which then ends both.
                self._process = subprocess.Popen(
                    [sys.executable, str(settings.BASE_DIR / "manage.py"), "engine", "--until-eof"],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            return str(error)
        return self._process.wait()


class Command(BaseCommand):
    help = "Serve the pages, the API and the websockets, with an engine beside."

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
        """Until SIGTERM or Ctrl-C: the reactor handles both."""
        # Imported late: Daphne installs its reactor, which no other command should get.
        from daphne.endpoints import build_endpoint_description_strings

        from gateway.asgi import application
        from gateway.server import BackpressureServer

        display_host = f"[{host}]" if ":" in host else host
        server = BackpressureServer(
            application=application,
            endpoints=build_endpoint_description_strings(host=host, port=port),
            server_name="sluice",
            # Behind a proxy the address of a person is what the proxy says; nobody else is asked.
            proxy_forwarded_address_header="X-Forwarded-For" if settings.BEHIND_TLS else None,
            ready_callable=lambda: self.stdout.write(
                f"Sluice answers at http://{display_host}:{port}/"
            ),
        )
        connections.close_all()
        freeze_startup_objects()
        sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
        server.run()
