"""A way to slurmctld on which answers to requests for a step get lost, as those of a controller that hangs."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import threading
from pathlib import Path

# Slurm's wire: a length (32 bits), then version, flags and the kind of message (16 bits each); all big-endian.
STEP_CREATE = 5001


class DeafController:
    """Passes requests on to the real controller. Of those for a step, the first `losses` get no answer.

    `conf` is a slurm.conf whose users take this way. `hang`: the line stays open and silent, else it is closed.
    """

    def __init__(self, real_conf: Path, folder: Path, *, losses: int, hang: bool = False) -> None:
        self._losses, self._hang = losses, hang
        self._counting = threading.Lock()
        self._over = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=50)
        shutil.copytree(real_conf.parent, folder, ignore=shutil.ignore_patterns("*key*"))
        folder.chmod(0o755)
        self.conf = folder / "slurm.conf"
        port = r"(?m)^SlurmctldPort=(\d+)$"
        text = real_conf.read_text()
        self._real_port = int(re.findall(port, text)[0])
        own = f"SlurmctldPort={self._server.getsockname()[1]}"
        self.conf.write_text(re.sub(port, own, text))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._server.close()

    def left(self) -> int:
        """How many answers may still get lost."""
        return self._losses

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._real_port)) as controller:
            request = _message(client)
            controller.sendall(request)
            answer = _message(controller)
            if not self._is_lost(request):
                client.sendall(answer)
            elif self._hang:
                self._over.wait()

    def _is_lost(self, request: bytes) -> bool:
        kind = struct.unpack_from(">H", request, 8)[0] if len(request) >= 10 else 0
        with self._counting:
            if kind != STEP_CREATE or not self._losses:
                return False
            self._losses -= 1
            return True


def _message(line: socket.socket) -> bytes:
    with line.makefile("rb") as stream:
        head = stream.read(4)
        return head + stream.read(struct.unpack(">I", head)[0]) if len(head) == 4 else head
