"""`manage.py engine`: the engine alone. Any number may run; one works per cluster, the others stand by."""

from __future__ import annotations

import signal
import threading
from argparse import ArgumentParser
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from jobs.engine import Engine


class Command(BaseCommand):
    help = "Submit, poll and stop jobs until told to end (SIGTERM, Ctrl-C)."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="one pass for every cluster, then end"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        engine = Engine()
        if options["once"]:
            left_out = engine.run_once()
            if left_out:
                raise CommandError(f"Another engine works for {', '.join(left_out)}.")
            return
        stop = threading.Event()

        def end(number: int, frame: FrameType | None) -> None:
            stop.set()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        engine.run(stop)
