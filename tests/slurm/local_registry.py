"""A registry of container images on loopback: serves one image over plain HTTP, or answers with registry errors."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
USER, PASSWORD = "puller", "open:sesame"  # of the repository org/private
_CHUNK_BYTES = 64 * 1024


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _build_layer(busybox: Path, padding_bytes: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("bin", "dev", "proc", "sys", "tmp", "etc"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)
        tar.add(busybox, "bin/busybox")
        for applet in ("sh", "echo", "cat", "ls", "sleep"):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        padding = tarfile.TarInfo("padding")
        padding.size = padding_bytes
        tar.addfile(padding, io.BytesIO(bytes(padding_bytes)))
    return buffer.getvalue()


class LocalRegistry:
    """Repositories: org/app:1.0 exists; org/private:1.0 needs USER and PASSWORD; all other names are unknown."""

    def __init__(self, busybox: Path, *, padding_bytes: int, seconds: float) -> None:
        layer = _build_layer(busybox, padding_bytes)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Cmd": ["/bin/sh"]},
                "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
            }
        ).encode()
        self.layer_bytes, self.seconds = len(layer), seconds
        self.blobs = {_digest(blob): blob for blob in (layer, config)}
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": {
                    "mediaType": "application/vnd.docker.container.image.v1+json",
                    "size": len(config),
                    "digest": _digest(config),
                },
                "layers": [
                    {
                        "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
                        "size": len(layer),
                        "digest": _digest(layer),
                    }
                ],
            }
        ).encode()
        self.requests: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    registry: LocalRegistry
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        # A request without path is the TLS handshake that clients try first.
        self.registry.requests.append(f"{self.command} {getattr(self, 'path', '')}")

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        pieces = range(0, len(body), _CHUNK_BYTES)
        for start in pieces:
            self.wfile.write(body[start : start + _CHUNK_BYTES])
            if len(pieces) > 1:
                time.sleep(self.registry.seconds / len(pieces))

    def _send_error(self, status: int, code: str, message: str) -> None:
        body = {"errors": [{"code": code, "message": message}]}
        headers = {"WWW-Authenticate": 'Basic realm="local"'} if status == 401 else {}
        self._send(status, json.dumps(body).encode(), headers)

    def _is_authorized(self) -> bool:
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        return self.headers.get("Authorization", "") == f"Basic {expected}"

    def do_GET(self) -> None:
        parts = self.path.strip("/").split("/")
        if parts == ["v2"]:  # a client sends its login only after a challenge here
            if self._is_authorized():
                self._send(200, b"{}")
            else:
                self._send_error(401, "UNAUTHORIZED", "authentication required")
            return
        name, kind, reference = "/".join(parts[1:-2]), parts[-2], parts[-1]
        if name == "org/private" and not self._is_authorized():
            self._send_error(401, "UNAUTHORIZED", "authentication required")
        elif name not in ("org/app", "org/private"):
            self._send_error(404, "NAME_UNKNOWN", "repository name not known to registry")
        elif kind == "blobs" and reference in self.registry.blobs:
            self._send(200, self.registry.blobs[reference])
        elif kind == "manifests" and reference in ("1.0", _digest(self.registry.manifest)):
            digest = _digest(self.registry.manifest)
            headers = {"Content-Type": MANIFEST_TYPE, "Docker-Content-Digest": digest}
            self._send(200, self.registry.manifest, headers)
        else:
            self._send_error(404, "MANIFEST_UNKNOWN", "manifest unknown")

    def do_HEAD(self) -> None:
        self.do_GET()


@contextmanager
def serve_registry(
    busybox: Path, *, padding_bytes: int = 1024, seconds: float = 0.0
) -> Iterator[tuple[LocalRegistry, str]]:
    """Serve a registry; yields it with its address. The layer of an image takes `seconds` to send."""
    registry = LocalRegistry(busybox, padding_bytes=padding_bytes, seconds=seconds)
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield registry, f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
