"""Views for HTTP errors: problem+json for requests to the API, HTML pages for others."""

from __future__ import annotations

import sys
from collections.abc import Callable

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from core.cancellation import RequestCancelled
from core.translation import translate
from gateway import problems


def error_page(request: HttpRequest, status: int, title: str, sentence: str) -> HttpResponse:
    context = {"status": status, "title": title, "sentence": sentence}
    return render(request, "error.html", context, status=status)


def problem_or_page(request: HttpRequest, status: int, title: str, sentence: str) -> HttpResponse:
    if problems.is_api_request(request):
        return problems.problem_for_status(status)
    return error_page(request, status, title, sentence)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    title = _("This request could not be understood")
    return problem_or_page(request, 400, title, _("Go back, reload the page and try again."))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    sentence = _("Ask an administrator of the namespace for access, or sign in as someone else.")
    return problem_or_page(request, 403, _("You may not do this"), sentence)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    sentence = _("The address is wrong, the page was deleted, or you may not see it.")
    return problem_or_page(request, 404, _("Not found"), sentence)


def server_error(request: HttpRequest) -> HttpResponse:
    """Render a page without database and context processors, because these may have caused the error.

    If the database was unavailable or did not answer in time, the response is 503, as in the API.
    """
    if problems.is_api_request(request):
        return problems.problem_for_status(500)
    # Django calls this view while it handles the exception.
    unavailable = isinstance(sys.exception(), OperationalError | InterfaceError)
    page = render_to_string("500.html", {"unavailable": unavailable})
    if not unavailable:
        return HttpResponse(page, status=500)
    return HttpResponse(page, status=503, headers={"Retry-After": str(problems.RETRY_AFTER_S)})


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    title = _("This page was open for too long")
    sentence = _("Your session changed meanwhile. Go back, reload the page and send it again.")
    return error_page(request, 403, title, sentence)


def cancelled_requests(
    get_response: Callable[[HttpRequest], HttpResponseBase],
) -> Callable[[HttpRequest], HttpResponseBase]:
    """Middleware: a page whose request was cancelled or took too long responds 503, not 500."""

    def middleware(request: HttpRequest) -> HttpResponseBase:
        return get_response(request)

    def process_exception(request: HttpRequest, error: Exception) -> HttpResponse | None:
        if not isinstance(error, RequestCancelled):
            return None
        return error_page(request, 503, _("Temporarily unavailable"), translate(error.user_message))

    middleware.process_exception = process_exception  # type: ignore[attr-defined]
    return middleware
