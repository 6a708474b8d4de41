"""Middleware that sets the headers Content-Security-Policy, Cache-Control and Vary of every response.

Responses of WhiteNoise (static files) do not pass through it; they have the policies of WhiteNoise. No view sets
Cache-Control: a response that may be stored is listed in the setting CACHEABLE_VIEWS.
"""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.cache import patch_vary_headers

# Pages, API, downloads, errors and redirects depend on the person. `no-store` also keeps browsers from showing a page
# again, from disk or with the Back button, after its person has signed out.
PRIVATE_POLICY = "private, no-store"
# Request headers on which every response depends: session and language cookie, API token, language of the browser.
VARY_HEADERS = ("Cookie", "Authorization", "Accept-Language")


def response_headers(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Set the three headers. A view may set its own Content-Security-Policy and extend Vary."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        response = get_response(request)
        response.headers.setdefault("Content-Security-Policy", settings.CONTENT_SECURITY_POLICY)
        response.headers["Cache-Control"] = _find_cache_policy(request, response)
        # Sent by Django's `never_cache`; without meaning beside Cache-Control.
        response.headers.pop("Expires", None)
        patch_vary_headers(response, VARY_HEADERS)
        return response

    return middleware


def _find_cache_policy(request: HttpRequest, response: HttpResponseBase) -> str:
    match = request.resolver_match
    if match is None or response.status_code not in (200, 304):
        return PRIVATE_POLICY
    policy: str = settings.CACHEABLE_VIEWS.get(match.view_name, PRIVATE_POLICY)
    return policy
