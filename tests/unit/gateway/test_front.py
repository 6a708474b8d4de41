"""The configuration of nginx: values that nginx would interpret are refused, and what depends on the options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.front import ErrorText, FrontOptions, UnsafeValue, render_front

OPTIONS = FrontOptions(
    listen="127.0.0.1:8000",
    web=["unix:/run/sluice/web-1.sock", "10.0.0.2:8000"],
    server_names=["sluice.lab.example"],
    max_body_bytes=2_000_000,
    max_upload_bytes=1000,
    request_timeout_s=60,
    texts=[ErrorText(413, "en", "<p>too large</p>", '{"code": "too_large"}')],
)


def test_every_web_process_is_in_both_upstreams() -> None:
    text = render_front(OPTIONS)
    for address in OPTIONS.web:
        assert text.count(f"server {address} ") == 2


def test_site_without_tls_does_not_redirect() -> None:
    assert "ssl" not in render_front(OPTIONS)
    assert "return 301" not in render_front(OPTIONS)
    tls = render_front(replace(OPTIONS, listen="443", tls_certificate="/c", tls_key="/k"))
    assert "listen 443 ssl http2;" in tls
    assert "return 301 https://" in tls


def test_static_files_are_served_only_if_they_were_collected() -> None:
    assert "alias" not in render_front(OPTIONS)
    assert 'alias "/srv/static/";' in render_front(
        replace(OPTIONS, static_root=Path("/srv/static"))
    )


def test_client_cannot_set_the_headers_that_web_processes_believe() -> None:
    text = render_front(OPTIONS)
    # Every block with headers of its own must repeat all of them, because nginx then inherits none.
    blocks = text.count("proxy_set_header Host")
    assert blocks == text.count("proxy_set_header X-Forwarded-For $remote_addr;")
    for header in ("X-Forwarded-Host", "X-Real-IP", "Forwarded", "Daphne-Root-Path"):
        assert text.count(f'proxy_set_header {header} "";') == blocks, header


@pytest.mark.parametrize("value", ["", "a b", "a;b", "a{", "a'", 'a"', "$host", "a\\b", "a\n"])
@pytest.mark.parametrize("field", ["listen", "access_log", "tls_certificate", "private_dir"])
def test_values_that_nginx_would_interpret_are_refused(field: str, value: str) -> None:
    if not value and field != "listen":
        return  # an empty value means that there is none
    changed = replace(OPTIONS, tls_key="/k", **{field: value})
    with pytest.raises(UnsafeValue):
        render_front(changed)


@pytest.mark.parametrize("text", ["it's", "a\\nb", "$x", "a\nb"])
def test_texts_that_nginx_would_interpret_are_refused(text: str) -> None:
    with pytest.raises(UnsafeValue):
        render_front(replace(OPTIONS, texts=[ErrorText(413, "en", text, "{}")]))
