"""`manage.py serve`: Daphne with the engine inside, for one machine. In production run them apart."""

from __future__ import annotations

import gc
import sys
import threading
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import connections

# New objects until the collector looks; Python's own 700 are a fraction of one request.
GARBAGE_AFTER = 20_000
# How long a thread may compute while another one waits for its turn. Python's own 5 ms are spent at
# every hop of a log line on its way through the threads.
THREADS_TURN_S = 0.001


class Command(BaseCommand):
    help = "Serve the pages, the API and the websockets, and run the engine in the same process."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--port", type=int, default=8000)
        parser.add_argument(
            "--no-engine", action="store_true", help="web only: engines run as `manage.py engine`"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        # Imported late: Daphne installs its reactor, which no other command should get.
        from daphne.endpoints import build_endpoint_description_strings

        from gateway.asgi import application
        from gateway.server import BackpressureServer
        from jobs.engine import run_engine

        host, port = options["host"], options["port"]
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
        # What was loaded stays for good: the garbage collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_AFTER)
        sys.setswitchinterval(THREADS_TURN_S)
        stop = threading.Event()
        engine = threading.Thread(target=run_engine, args=(stop,), name="engine")
        if not options["no_engine"]:
            engine.start()
        try:
            # Until SIGTERM or Ctrl-C: the reactor handles both.
            server.run()
        finally:
            stop.set()
            if not options["no_engine"]:
                engine.join()
