"""`manage.py engine`: the engine alone. Any number may run; one works per cluster, the others stand by."""

from __future__ import annotations

import os
import signal
import threading
from argparse import ArgumentParser
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from core.process import freeze_startup_objects
from engine.loop import Engine


class Command(BaseCommand):
    help = "Submit, poll and stop jobs until told to end (SIGTERM, Ctrl-C)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="one pass for every cluster, then end"
        )
        parser.add_argument(
            "--until-eof", action="store_true", help="end also when the standard input ends"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        engine = Engine()
        if options["once"]:
            skipped = engine.run_once()
            if skipped:
                raise CommandError(f"Another engine works for {', '.join(skipped)}.")
            return
        stop = threading.Event()

        def request_stop(number: int, frame: FrameType | None) -> None:
            stop.set()

        signal.signal(signal.SIGTERM, request_stop)
        signal.signal(signal.SIGINT, request_stop)
        if options["until_eof"]:
            threading.Thread(target=_stop_at_eof, args=(stop,), daemon=True).start()
        freeze_startup_objects()
        engine.run(stop)


def _stop_at_eof(stop: threading.Event) -> None:
    # Not `sys.stdin`: Python aborts where it finds a thread reading that at its own end.
    while os.read(0, 4096):
        pass
    stop.set()
