"""`manage.py front --print`: prints the configuration of nginx for a production site."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import translation

from gateway.front import ErrorText, FrontOptions, UnsafeValue, render_front
from gateway.problems import problem_for_status

DEFAULT_SOCKET = "unix:/run/sluice/web-1.sock"
# Views check their own, smaller limits; this much more lets them answer with their own sentence.
BODY_SLACK_BYTES = 256 * 1024


def build_front_options(
    *, listen: str, web: Sequence[str], server_names: Sequence[str], **more: Any
) -> FrontOptions:
    """Return the options with the limits of this site's settings."""
    form_limit = int(settings.DATA_UPLOAD_MAX_MEMORY_SIZE or 0)
    return FrontOptions(
        listen=listen,
        web=web,
        server_names=server_names,
        max_body_bytes=max(settings.API_MAX_BODY_BYTES, form_limit) + BODY_SLACK_BYTES,
        max_upload_bytes=settings.UPLOAD_MAX_BYTES,
        request_timeout_s=settings.WEB_REQUEST_TIMEOUT_S,
        texts=list(list_error_texts()),
        static_root=Path(settings.STATIC_ROOT) if settings.STATIC_ROOT else None,
        **more,
    )


def list_error_texts() -> Iterator[ErrorText]:
    """Yield the responses that nginx sends itself, in both languages."""
    for code, language in (("en", "en"), ("zh-hans", "zh")):
        with translation.override(code):
            for status in (401, 403, 413, 503):
                problem = problem_for_status(status).content.decode()
                fields = json.loads(problem)
                page = (
                    f'<!doctype html><html lang="{code}"><meta charset="utf-8"><title>Sluice</title>'
                    f"<h1>{fields['title']}</h1><p>{fields['detail']}</p></html>"
                )
                yield ErrorText(status, language, page, problem)


class Command(BaseCommand):
    help = (
        "Print the configuration of nginx in front of the web processes, for a file in "
        "/etc/nginx/conf.d. `manage.py serve --front` runs an nginx of its own instead."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--print", action="store_true", required=True, help="print it")
        parser.add_argument(
            "--listen", default="", help="address to listen on (443, without TLS 80)"
        )
        parser.add_argument(
            "--server-name",
            action="append",
            default=[],
            help="host name of the site; may be repeated (SLUICE_ALLOWED_HOSTS)",
        )
        parser.add_argument(
            "--web",
            action="append",
            default=[],
            help=f"a web process, unix:/path or host:port; may be repeated ({DEFAULT_SOCKET})",
        )
        parser.add_argument("--tls-certificate", default="", help="file with the certificate chain")
        parser.add_argument("--tls-key", default="", help="file with the certificate's key")
        parser.add_argument("--access-log", default="/var/log/nginx/sluice.log")

    def handle(self, *args: Any, **options: Any) -> None:
        certificate, key = options["tls_certificate"], options["tls_key"]
        if bool(certificate) != bool(key):
            raise CommandError("TLS needs both --tls-certificate and --tls-key.")
        front = build_front_options(
            listen=options["listen"] or ("443" if certificate else "80"),
            web=options["web"] or [DEFAULT_SOCKET],
            server_names=options["server_name"] or settings.ALLOWED_HOSTS,
            tls_certificate=certificate,
            tls_key=key,
            access_log=options["access_log"],
        )
        try:
            self.stdout.write(render_front(front))
        except UnsafeValue as error:
            raise CommandError(str(error)) from None
