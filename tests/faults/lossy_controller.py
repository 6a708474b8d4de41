"""TCP proxy in front of slurmctld that drops replies to step creation requests, like a hanging controller."""

from __future__ import annotations

import re
import shutil
import socket
import struct
import threading
from pathlib import Path

# Slurm's wire format: length (32 bits), then version, flags and message type (16 bits each), big-endian.
STEP_CREATE = 5001


class LossyControllerProxy:
    """Forwards requests to the real controller and drops the first `drop_count` replies to step creation.

    `conf` is a slurm.conf that points to the proxy. `hang`: keep the connection open without a reply instead
    of closing it.
    """

    def __init__(
        self, real_conf: Path, folder: Path, *, drop_count: int, hang: bool = False
    ) -> None:
        self._drop_count, self._hang = drop_count, hang
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0), backlog=50)
        shutil.copytree(real_conf.parent, folder, ignore=shutil.ignore_patterns("*key*"))
        folder.chmod(0o755)
        self.conf = folder / "slurm.conf"
        port = r"(?m)^SlurmctldPort=(\d+)$"
        text = real_conf.read_text()
        self._real_port = int(re.findall(port, text)[0])
        own_port = f"SlurmctldPort={self._server.getsockname()[1]}"
        self.conf.write_text(re.sub(port, own_port, text))
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._server.close()

    def remaining_drops(self) -> int:
        return self._drop_count

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._real_port)) as controller:
            request = _read_message(client)
            controller.sendall(request)
            reply = _read_message(controller)
            if not self._should_drop(request):
                client.sendall(reply)
            elif self._hang:
                self._closed.wait()

    def _should_drop(self, request: bytes) -> bool:
        kind = struct.unpack_from(">H", request, 8)[0] if len(request) >= 10 else 0
        with self._lock:
            if kind != STEP_CREATE or not self._drop_count:
                return False
            self._drop_count -= 1
            return True


def _read_message(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        head = stream.read(4)
        return head + stream.read(struct.unpack(">I", head)[0]) if len(head) == 4 else head
