"""The configuration of nginx in front of the web processes. `manage.py front --print` prints it; pure.

nginx terminates TLS, serves static files, limits and buffers request bodies, disconnects slow clients and sets the
client's address. It knows no permission: before it receives a large body it asks a web process whether the request is
authenticated (`gateway.front_views`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

# Only these URLs accept bodies larger than `max_body_bytes`.
UPLOAD_URLS = r"^/api/v1/(jobs|jobs/plan|uploads)$"
# A multipart body may exceed the limit of an upload by this much, for the boundaries and the job file.
MULTIPART_OVERHEAD_BYTES = 16 * 1024 * 1024
# nginx has no way to quote these inside its quoted strings, or would expand them.
_UNSAFE = re.compile(r"""["'\\;{}$\s]""")


class UnsafeValue(ValueError):
    """A value cannot be written into the configuration."""


@dataclass(frozen=True, slots=True)
class ErrorText:
    """What nginx answers with a status, in one language (`en` or `zh`): a page, and problem+json for the API."""

    status: int
    language: str
    page: str
    problem: str


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What the configuration depends on. Addresses are `host:port`; those of web processes may be `unix:/path`."""

    listen: str
    web: Sequence[str]
    server_names: Sequence[str]
    max_body_bytes: int
    max_upload_bytes: int
    request_timeout_s: int
    texts: Sequence[ErrorText]
    static_root: Path | None = None
    tls_certificate: str = ""
    tls_key: str = ""
    # For an nginx of its own (`manage.py serve --front`): its directory, its user and its limit of open files. Without
    # a directory the result is a file for the machine's nginx, to be included inside its `http` block.
    private_dir: Path | None = None
    user: str = ""
    max_open_files: int = 65536
    access_log: str = ""


# Headers that Daphne, Django or Sluice would believe are removed or set here, whatever the client sent.
_PROXY_HEADERS = """\
proxy_http_version 1.1;
proxy_set_header Host $$http_host;
proxy_set_header X-Forwarded-For $$remote_addr;
proxy_set_header X-Forwarded-Proto $$scheme;
proxy_set_header X-Forwarded-Host "";
proxy_set_header X-Forwarded-Port "";
proxy_set_header X-Real-IP "";
proxy_set_header Forwarded "";
proxy_set_header Daphne-Root-Path "";
"""

_HTTP = Template(
    """\
# The body of a request that may be large: its length has seven digits or more, or is not announced.
map "$$http_transfer_encoding:$$content_length" $$sluice_body {
    default small;
    "~^:[0-9]{7,}$$" large;
    "~^[^:]" large;
}
map "$$cookie_django_language:$$http_accept_language" $$sluice_language {
    default en;
    "~^zh" zh;
    "~*^:zh" zh;
}
$error_maps
upstream sluice_web {
    least_conn;
$servers
    keepalive 16;
    # Less than the 60 s after which a web process closes an idle connection.
    keepalive_timeout 30s;
}
# All viewers of one log reach the same web process, which follows the log once.
upstream sluice_web_by_path {
    hash $$uri consistent;
$servers
}
log_format sluice '$$remote_addr $$time_iso8601 "$$request_method $$uri" $$status $$body_bytes_sent $$request_time';
server {
$listen
    server_name $server_names;
    server_tokens off;
    access_log $access_log;
    client_max_body_size $max_body;
    # A client that sends or reads nothing for this long is disconnected.
    client_header_timeout 10s;
    client_body_timeout 20s;
    send_timeout 60s;
    reset_timedout_connection on;
    client_header_buffer_size 4k;
    large_client_header_buffers 4 16k;
    proxy_connect_timeout 5s;
    proxy_send_timeout 60s;
    proxy_read_timeout ${read_timeout}s;
    # Small responses leave the web process at once; of a large one nginx holds 512 KiB and waits for the client.
    proxy_buffer_size 16k;
    proxy_buffers 32 16k;
    proxy_max_temp_file_size 0;
    error_page 413 @page_413;
    error_page 502 504 =503 @page_503;
$headers
    proxy_set_header Connection "";

    location / {
        proxy_pass http://sluice_web;
    }
    location /api/ {
        # A location with error pages of its own inherits none.
        error_page 413 @api_413;
        error_page 502 504 =503 @api_503;
        proxy_pass http://sluice_web;
    }
    location ~ $upload_urls {
        client_max_body_size $max_upload;
        error_page 413 @api_413;
        error_page 502 504 =503 @api_503;
        if ($$sluice_body = large) {
            rewrite ^(.*)$$ /_front/upload$$1 last;
        }
        proxy_pass http://sluice_web;
    }
    # The body of an upload is received only after the request was authenticated.
    location /_front/upload/ {
        internal;
        client_max_body_size $max_upload;
        auth_request /_front/authenticate;
        error_page 401 @api_401;
        error_page 403 @api_403;
        error_page 413 @api_413;
        # nginx answers 500 if the web process could not decide.
        error_page 500 =503 @api_503;
        error_page 502 504 =503 @api_503;
        rewrite ^/_front/upload(/.*)$$ $$1 break;
        proxy_pass http://sluice_web;
    }
    location = /_front/authenticate {
        internal;
        # The subrequest receives no body, but nginx compares the announced length with its limit.
        client_max_body_size 0;
        proxy_pass http://sluice_web/front/authenticate;
        proxy_method GET;
        proxy_pass_request_body off;
        proxy_set_header Content-Length "";
        proxy_set_header Content-Type "";
        proxy_set_header Connection "";
        ${headers_inner}
    }
    location /ws/ {
        proxy_pass http://sluice_web;
        ${websocket}
    }
    location /ws/jobs/ {
        proxy_pass http://sluice_web_by_path;
        ${websocket}
    }
$static
$error_locations
}
"""
)

_STATIC = Template(
    """\
    # The names of collected files contain a hash of the content, so browsers never need to ask again.
    location /static/ {
        alias "$root/";
        types {
            text/html html;
            text/css css;
            application/javascript js mjs;
            application/json json map;
            image/svg+xml svg;
            image/png png;
            image/x-icon ico;
            font/woff2 woff2;
            font/woff woff;
            text/plain txt;
        }
        default_type application/octet-stream;
        gzip_static on;
        gzip_vary on;
        add_header X-Content-Type-Options nosniff always;
        add_header Cache-Control "public, max-age=3600";
        location ~ "\\.[0-9a-f]{12}\\." {
            gzip_static on;
            gzip_vary on;
            add_header X-Content-Type-Options nosniff always;
            add_header Cache-Control "public, max-age=31536000, immutable";
        }
    }
"""
)

_TLS = Template(
    """\
    ssl_certificate "$certificate";
    ssl_certificate_key "$key";
    ssl_protocols TLSv1.2 TLSv1.3;
    ssl_session_cache shared:sluice:10m;
    ssl_session_timeout 1d;
    ssl_session_tickets off;\
"""
)

_REDIRECT = Template(
    """\
server {
    listen 80;
    listen [::]:80;
    server_name $server_names;
    server_tokens off;
    return 301 https://$$host$$request_uri;
}
"""
)

_PRIVATE = Template(
    """\
daemon off;
$user
worker_processes 1;
worker_rlimit_nofile $max_open_files;
pid "$dir/nginx.pid";
error_log stderr warn;
events { worker_connections $connections; }
http {
    client_body_temp_path "$dir/bodies";
    proxy_temp_path "$dir/proxy";
    fastcgi_temp_path "$dir/unused";
    uwsgi_temp_path "$dir/unused";
    scgi_temp_path "$dir/unused";
    sendfile on;
    tcp_nodelay on;
    map_hash_bucket_size 128;
    map_hash_max_size 4096;
$http
}
"""
)

# Sent by nginx itself, because a web process could answer only after nginx had received the whole body.
_ERROR_LOCATION = Template(
    """\
    location @${kind}_$status {
        internal;
        default_type "$content_type";
        add_header Cache-Control no-store always;
        add_header X-Content-Type-Options nosniff always;$retry_after
        return $status $$sluice_${kind}_$status;
    }"""
)

_WEBSOCKET = """\
proxy_set_header Connection upgrade;
proxy_set_header Upgrade $http_upgrade;
proxy_buffering off;
# Web processes send a ping every 20 s.
proxy_read_timeout 120s;
"""


def render_front(options: FrontOptions) -> str:
    """Return the configuration. Raises UnsafeValue for values with characters that nginx would interpret."""
    headers = Template(_PROXY_HEADERS).substitute()
    http = _HTTP.substitute(
        servers="\n".join(
            f"    server {_checked(address)} max_fails=3 fail_timeout=2s;"
            for address in options.web
        ),
        listen=_render_listen(options),
        server_names=_render_names(options),
        access_log=f'"{_checked(options.access_log)}" sluice' if options.access_log else "off",
        max_body=options.max_body_bytes,
        max_upload=options.max_upload_bytes + MULTIPART_OVERHEAD_BYTES,
        read_timeout=options.request_timeout_s + 15,
        upload_urls=UPLOAD_URLS,
        headers=_indent(headers, 4),
        headers_inner=_indent(headers, 8).strip(),
        websocket=_indent(headers + _WEBSOCKET, 8).strip(),
        error_maps="\n".join(_render_error_maps(options.texts)),
        error_locations="\n".join(_render_error_locations(options.texts)),
        static=_STATIC.substitute(root=_checked(str(options.static_root)))
        if options.static_root
        else "",
    )
    if options.tls_certificate:
        http = _REDIRECT.substitute(server_names=_render_names(options)) + http
    if options.private_dir is None:
        return http
    return _PRIVATE.substitute(
        dir=_checked(str(options.private_dir)),
        user=f"user {_checked(options.user)};" if options.user else "",
        max_open_files=options.max_open_files,
        connections=options.max_open_files // 2,
        http=_indent(http, 4),
    )


def _render_error_maps(texts: Sequence[ErrorText]) -> Iterator[str]:
    for status in sorted({text.status for text in texts}):
        for kind in ("page", "api"):
            yield f"map $sluice_language $sluice_{kind}_{status} {{"
            for text in texts:
                if text.status == status:
                    body = text.page if kind == "page" else text.problem
                    yield f"    {text.language} '{_checked_text(body)}';"
            yield "}"


def _render_error_locations(texts: Sequence[ErrorText]) -> Iterator[str]:
    for status in sorted({text.status for text in texts}):
        for kind, content_type in (
            ("page", "text/html; charset=utf-8"),
            ("api", "application/problem+json"),
        ):
            yield _ERROR_LOCATION.substitute(
                kind=kind,
                status=status,
                content_type=content_type,
                retry_after="\n        add_header Retry-After 5 always;" if status == 503 else "",
            )


def _checked_text(text: str) -> str:
    if any(character in text for character in "'\\$\n"):
        raise UnsafeValue(f"{text!r} cannot be used in the configuration of nginx.")
    return text


def _render_listen(options: FrontOptions) -> str:
    listen = _checked(options.listen)
    if not options.tls_certificate:
        return f"    listen {listen};"
    tls = _TLS.substitute(
        certificate=_checked(options.tls_certificate), key=_checked(options.tls_key)
    )
    return f"    listen {listen} ssl http2;\n{tls}"


def _render_names(options: FrontOptions) -> str:
    return " ".join(_checked(name) for name in options.server_names) or "_"


def _checked(value: str) -> str:
    if not value or _UNSAFE.search(value):
        raise UnsafeValue(
            f"{value!r} cannot be used in the configuration of nginx: it is empty or contains "
            "a space, a quote or one of \\ ; { } $."
        )
    return value


def _indent(text: str, columns: int) -> str:
    return "\n".join(" " * columns + line if line else "" for line in text.splitlines())
