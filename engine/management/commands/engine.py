"""`manage.py engine`: runs an engine process. If several run, one leads each cluster and the others stand by."""

from __future__ import annotations

import os
import signal
import threading
from argparse import ArgumentParser
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from core.process import exit_without_waiting, freeze_startup_objects
from engine.loop import Engine


class Command(BaseCommand):
    help = "Submit, poll and stop jobs until SIGTERM or Ctrl-C."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="run every pass once for each cluster, then exit"
        )
        parser.add_argument(
            "--until-eof", action="store_true", help="exit also at the end of standard input"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        engine = Engine()
        if options["once"]:
            skipped = engine.run_once()
            if skipped:
                raise CommandError(f"Another engine leads {', '.join(skipped)}.")
            return
        stop = threading.Event()

        def request_stop(number: int, frame: FrameType | None) -> None:
            stop.set()

        signal.signal(signal.SIGTERM, request_stop)
        signal.signal(signal.SIGINT, request_stop)
        if options["until_eof"]:
            threading.Thread(target=_stop_at_eof, args=(stop,), daemon=True).start()
        freeze_startup_objects()
        if not engine.run(stop):
            exit_without_waiting()


def _stop_at_eof(stop: threading.Event) -> None:
    # os.read instead of sys.stdin: at exit Python aborts while another thread reads sys.stdin.
    while os.read(0, 4096):
        pass
    stop.set()
