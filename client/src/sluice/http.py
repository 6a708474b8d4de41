"""The only module that calls the REST API: authentication, retries, errors.

Only requests that can be repeated safely are retried: reads, requests with an Idempotency-Key, requests that the caller
declares repeatable, and requests that the server rejected without processing them (429).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from sluice.errors import (
    ERROR_BY_STATUS,
    FieldError,
    Invalid,
    ServerFailed,
    SluiceError,
    Throttled,
    Unreachable,
)
from sluice.messages import language, t
from sluice.version import VERSION

PREFIX = "/api/v1/"
USER_AGENT = f"sluice-python/{VERSION}"
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
# For uploads and submissions: the server unpacks and checks an archive before it responds.
LONG_TIMEOUT = httpx.Timeout(300.0, connect=10.0)
MAX_TRIES = 4
MAX_BACKOFF_S = 20.0
SAFE_METHODS = frozenset(("GET", "HEAD"))
# Errors of a proxy or of the cluster, after which the same request may succeed later.
TRANSIENT_STATUSES = frozenset((502, 503, 504))


def normalize_url(url: str) -> str:
    """Return the server's address without trailing slash and API path. Raises Invalid."""
    text = url.strip()
    if text and "://" not in text:
        text = "http://" + text
    try:
        parts = urlsplit(text)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_is_valid = False
    if not port_is_valid or parts.scheme not in ("http", "https") or not parts.hostname:
        raise Invalid(t("{url} is not a URL; use one such as https://sluice.example.org.", url=url))
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}".removesuffix("/api/v1")


class ApiSession:
    """HTTP to one server as one user."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        verify: bool | str = True,
    ) -> None:
        self.url = normalize_url(url)
        self.token = token
        self.verify = verify
        self._sleep = sleep
        headers = {
            "User-Agent": USER_AGENT,
            "Accept": "application/json",
            "Accept-Language": language(),
        }
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if isinstance(verify, str):
            import ssl

            context: Any = ssl.create_default_context(cafile=verify)
        else:
            context = verify
        self._http = httpx.Client(
            base_url=self.url + PREFIX,
            headers=headers,
            timeout=TIMEOUT,
            transport=transport,
            verify=context,
        )

    def close(self) -> None:
        self._http.close()

    # --- requests -----------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        content: Callable[[], Any] | None = None,
        headers: Mapping[str, str] | None = None,
        auth: tuple[str, str] | None = None,
        repeatable: bool = False,
    ) -> httpx.Response:
        """Return the response with its body. `content` is called for each try and returns the request's body."""
        has_idempotency_key = "Idempotency-Key" in (headers or {})
        options: dict[str, Any] = {}
        if content or has_idempotency_key:
            options["timeout"] = LONG_TIMEOUT
        repeatable = repeatable or has_idempotency_key or method in SAFE_METHODS
        if auth is not None:
            options["auth"] = httpx.BasicAuth(*auth)
        attempt = 0
        while True:
            attempt += 1
            try:
                response = self._http.request(
                    method,
                    path,
                    params=encode_params(params),
                    json=json,
                    content=content() if content else None,
                    headers=dict(headers or {}),
                    **options,
                )
            except httpx.TransportError as error:
                if not repeatable or attempt >= MAX_TRIES:
                    raise self.unreachable_error(error) from error
                self._sleep(backoff_s(attempt))
                continue
            except httpx.InvalidURL as error:
                raise Invalid(str(error)) from error
            if response.is_success:
                return response
            delay_s = self._retry_delay_s(response, repeatable)
            if delay_s is None or attempt >= MAX_TRIES:
                raise parse_error_response(response)
            self._sleep(max(delay_s, backoff_s(attempt)))

    @staticmethod
    def _retry_delay_s(response: httpx.Response, repeatable: bool) -> float | None:
        """Return the seconds until the same request may be sent again; None if it must not be sent again."""
        status = response.status_code
        if status != 429 and not (repeatable and status in TRANSIENT_STATUSES):
            return None
        delay_s = retry_after_s(response)
        return delay_s if delay_s <= MAX_BACKOFF_S else None

    def json(self, method: str, path: str, **options: Any) -> Any:
        """Call `request` and return the decoded body."""
        return decode_json(self.request(method, path, **options))

    @contextmanager
    def stream(
        self, path: str, *, params: Mapping[str, Any] | None = None, headers: Mapping[str, str]
    ) -> Iterator[httpx.Response]:
        """Yield the response with its body still to be read. Network failures raise httpx.TransportError."""
        # Without compression, because downloads continue at a byte position of the file.
        stream_headers = {"Accept-Encoding": "identity", **headers}
        with self._http.stream(
            "GET", path, params=encode_params(params), headers=stream_headers
        ) as response:
            if not response.is_success:
                response.read()
                raise parse_error_response(response)
            yield response

    def unreachable_error(self, error: Exception) -> Unreachable:
        if isinstance(error, httpx.TimeoutException):
            message = t("{url} did not respond in time. Try again.", url=self.url)
        elif "CERTIFICATE" in str(error).upper():
            message = t(
                "The certificate of {url} is not trusted: {problem}",
                url=self.url,
                problem=str(error),
            )
        else:
            message = t(
                "{url} cannot be reached ({problem}). Check the address and the network.",
                url=self.url,
                problem=str(error) or type(error).__name__,
            )
        return Unreachable(message, code="unreachable")

    @property
    def socket_url(self) -> str:
        return self.url.replace("http", "ws", 1)


def encode_params(params: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the query parameters that have a value, with lists joined by commas and booleans as 1 and 0."""
    encoded: dict[str, str] = {}
    for name, value in (params or {}).items():
        if value is None or value == "" or value == ():
            continue
        if isinstance(value, bool):
            encoded[name] = "1" if value else "0"
        elif isinstance(value, list | tuple | set | frozenset):
            encoded[name] = ",".join(str(item) for item in value)
        else:
            encoded[name] = str(value)
    return encoded


def backoff_s(attempt: int) -> float:
    """Return the delay after this many failed tries: exponential back-off with jitter."""
    return min(MAX_BACKOFF_S, 0.4 * 2.0**attempt) * random.uniform(0.5, 1.0)  # noqa: S311


def retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", "1")))
    except ValueError:
        return 1.0


def decode_json(response: httpx.Response) -> Any:
    if response.status_code == 204 or not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        raise ServerFailed(
            t(
                "{url} responds, but is not a Sluice server. Check the address.",
                url=response.url.host,
            ),
            code="not_sluice",
            status=response.status_code,
        ) from None


def parse_error_response(response: httpx.Response) -> SluiceError:
    """Return the exception for an error response: problem+json of Sluice, or the response of a proxy."""
    status = response.status_code
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return _parse_proxy_error(response)
    detail = str(body.get("detail") or body.get("title") or f"HTTP {status}")
    code = str(body.get("code") or "")
    if status == 429:
        return Throttled(detail, retry_after=retry_after_s(response), code=code)
    error_class = ERROR_BY_STATUS.get(status, ServerFailed if status >= 500 else SluiceError)
    rows = body.get("errors") or ()
    errors = tuple(parse_field_error(row) for row in rows if isinstance(row, dict))
    return error_class(detail, code=code, status=status, errors=errors)


def parse_field_error(row: Mapping[str, Any]) -> FieldError:
    return FieldError(
        path=str(row.get("path") or ""),
        message=str(row.get("message") or ""),
        code=str(row.get("code") or ""),
        suggestion=str(row.get("suggestion") or ""),
        line=row.get("line"),
        index=row.get("index"),
    )


def _parse_proxy_error(response: httpx.Response) -> SluiceError:
    status = response.status_code
    if response.is_redirect:
        message = t(
            "The server redirects to {place}. Use that address.",
            place=response.headers.get("Location", "?"),
        )
        return SluiceError(message, code="moved", status=status)
    if status == 429:
        return Throttled(t("Too many requests."), retry_after=retry_after_s(response))
    if status in TRANSIENT_STATUSES:
        message = t("Sluice is not available at the moment (HTTP {status}).", status=status)
        return ServerFailed(message, code="unavailable", status=status)
    message = t(
        "{url} responds, but is not a Sluice server. Check the address.", url=response.url.host
    )
    error_class = ERROR_BY_STATUS.get(status, ServerFailed)
    return error_class(message, code="not_sluice", status=status)
