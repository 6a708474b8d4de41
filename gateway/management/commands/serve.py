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

from core.process import spare_what_was_loaded

logger = logging.getLogger(__name__)

# How long a thread may compute while another one waits for its turn. Python's own 5 ms are spent at
# every hop of a log line on its way through the threads.
THREADS_TURN_S = 0.001
# The engine is started again after the first of these, and ever later while it does not stay.
START_AGAIN_S = (1.0, 2.0, 5.0, 15.0)
STAYED_S = 60.0


class EngineBeside:
    """`manage.py engine` as a process of its own: threads of one process take turns at Python, processes do not.

    It ends when its input does, so soon after this process, however that ends; if it ends by itself, it is
    started again.
    """

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep_running, name="engine keeper")

    def start(self) -> None:
        self._keeper.start()

    def stop(self) -> None:
        with self._lock:
            self._ending.set()
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.close()
        if self._keeper.is_alive():
            self._keeper.join()

    def _keep_running(self) -> None:
        short_lives = 0
        while not self._ending.is_set():
            began = time.monotonic()
            how = self._run_once()
            if self._ending.is_set():
                return
            if time.monotonic() - began > STAYED_S:
                short_lives = 0
            pause_s = START_AGAIN_S[min(short_lives, len(START_AGAIN_S) - 1)]
            short_lives += 1
            logger.error(
                "the engine ended by itself (%s) and is started again in %s s",
                how,
                pause_s,
                extra={"action": "engine_restart"},
            )
            self._ending.wait(pause_s)

    def _run_once(self) -> int | str:
        """Its exit code, or why it could not be started."""
        try:
            with self._lock:
                if self._ending.is_set():
                    return ""
                # A session of its own: a terminal's Ctrl-C is for the server, which then ends both.
                self._process = subprocess.Popen(
                    [sys.executable, str(settings.BASE_DIR / "manage.py"), "engine", "--until-eof"],
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as problem:
            return str(problem)
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
        with contextlib.ExitStack() as beside:
            if not options["no_engine"]:
                engine = EngineBeside()
                beside.callback(engine.stop)
                engine.start()
            self._serve(options["host"], options["port"])

    def _serve(self, host: str, port: int) -> None:
        """Until SIGTERM or Ctrl-C: the reactor handles both."""
        # Imported late: Daphne installs its reactor, which no other command should get.
        from daphne.endpoints import build_endpoint_description_strings

        from gateway.asgi import application
        from gateway.server import BackpressureServer

        shown = f"[{host}]" if ":" in host else host
        server = BackpressureServer(
            application=application,
            endpoints=build_endpoint_description_strings(host=host, port=port),
            server_name="sluice",
            # Behind a proxy the address of a person is what the proxy says; nobody else is asked.
            proxy_forwarded_address_header="X-Forwarded-For" if settings.BEHIND_TLS else None,
            ready_callable=lambda: self.stdout.write(f"Sluice answers at http://{shown}:{port}/"),
        )
        connections.close_all()
        spare_what_was_loaded()
        sys.setswitchinterval(THREADS_TURN_S)
        server.run()
