"""Views for HTTP errors: problem+json for requests to the API, HTML pages for others."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from gateway import problems


def error_page(status: int, title: str, sentence: str, request: HttpRequest) -> HttpResponse:
    context = {"status": status, "title": title, "sentence": sentence}
    return render(request, "error.html", context, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api_request(request):
        return problems.problem_for_status(400, request)
    return error_page(
        400,
        _("This request could not be understood"),
        _("Go back, reload the page and try again."),
        request,
    )


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api_request(request):
        return problems.problem_for_status(403, request)
    return error_page(
        403,
        _("You may not do this"),
        _("Ask an administrator of the namespace for access, or sign in as someone else."),
        request,
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api_request(request):
        return problems.problem_for_status(404, request)
    return error_page(
        404,
        _("Not found"),
        _("The address is wrong, it was deleted, or you may not see it."),
        request,
    )


def server_error(request: HttpRequest) -> HttpResponse:
    """Render a page without database and context processors, because these may have caused the error."""
    if problems.is_api_request(request):
        return problems.problem_for_status(500, request)
    return HttpResponse(render_to_string("500.html"), status=500)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return error_page(
        403,
        _("This page was open for too long"),
        _("Your session changed meanwhile. Go back, reload the page and send it again."),
        request,
    )
