"""Sign-in, preferences and health: what belongs to no app. Pages about jobs live in `jobs.web`."""

from __future__ import annotations

import math
import unicodedata
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode, urlsplit

from django.conf import settings
from django.contrib.auth.views import LoginView
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import check_for_language
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from clusters.models import ClusterStatus
from gateway import problems
from gateway.models import User
from gateway.throttle import buckets
from jobs.metrics import may_read_metrics

# A minute. A whole lab may come from one address; nobody mistypes a password ten times a minute.
TRIES_PER_NAME = 10
TRIES_PER_ADDRESS = 60
PREFERENCE_MAX_AGE_S = 365 * 24 * 3600
THEME_COOKIE = "sluice_theme"
# A pass of the engine takes seconds; one that is this old means that no engine works.
ENGINE_STALE_AFTER = timedelta(seconds=60)


def set_preference_cookie(response: HttpResponse, name: str, value: str) -> None:
    response.set_cookie(
        name, value, max_age=PREFERENCE_MAX_AGE_S, samesite="Lax", secure=settings.BEHIND_TLS
    )


class SignIn(LoginView):
    """The login page. A person's saved language and theme come with the sign-in."""

    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        # As the form will read it: other spellings of one name share its tries.
        name = unicodedata.normalize("NFKC", request.POST.get("username", "")).strip()[:150]
        address = request.META.get("REMOTE_ADDR", "")
        limits = (
            (f"sign-in:{name}", TRIES_PER_NAME),
            (f"sign-in-from:{address}", TRIES_PER_ADDRESS),
        )
        for key, per_minute in limits:
            if wait_s := buckets.take(key, per_minute):
                context = self.get_context_data(wait_s=math.ceil(wait_s))
                answer = self.render_to_response(context, status=429)
                answer["Retry-After"] = str(math.ceil(wait_s))
                return answer
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        user = form.get_user()
        if user.language:
            set_preference_cookie(response, settings.LANGUAGE_COOKIE_NAME, user.language)
        set_preference_cookie(response, THEME_COOKIE, user.theme)
        return response


@never_cache
def admin_sign_in(request: HttpRequest) -> HttpResponse:
    """The admin site's own sign-in would not count the tries: there is one sign-in."""
    if request.user.is_authenticated:
        if not request.user.is_staff:
            raise PermissionDenied
        return HttpResponseRedirect(reverse("admin:index"))
    wanted = urlencode({"next": request.GET.get("next", "")})
    return HttpResponseRedirect(f"{reverse('login')}?{wanted}")


@require_POST
def set_preferences(request: HttpRequest) -> HttpResponse:
    """Language and theme, for anyone; kept with the person when signed in."""
    back = request.POST.get("next", "")
    if not url_has_allowed_host_and_scheme(
        back, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        back = "/"
    parts = urlsplit(back)
    # Without the host, a path that begins with two slashes would be read as another host.
    path = "/" + parts.path.lstrip("/\\")
    response = HttpResponseRedirect(path + (f"?{parts.query}" if parts.query else ""))
    changed = []
    language, theme = request.POST.get("language", ""), request.POST.get("theme", "")
    if language in dict(settings.LANGUAGES) and check_for_language(language):
        set_preference_cookie(response, settings.LANGUAGE_COOKIE_NAME, language)
        changed.append(("language", language))
    if theme in User.Theme.values:
        set_preference_cookie(response, THEME_COOKIE, theme)
        changed.append(("theme", theme))
    if changed and request.user.is_authenticated:
        User.objects.filter(pk=request.user.pk).update(**dict(changed))
    return response


@require_GET
@never_cache
def healthz(request: HttpRequest) -> HttpResponse:
    """This process answers. Says nothing about the rest: a restart would not mend the rest."""
    return HttpResponse("ok\n", content_type="text/plain")


@require_GET
@never_cache
def readyz(request: HttpRequest) -> JsonResponse:
    """Whether work can be done: database, the engine's last pass, each cluster.

    Anybody is told yes or no; what is not ready, only those who may read the metrics.
    """
    checks: dict[str, dict[str, Any]] = {}
    detailed = False
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        checks["database"] = {"ok": True}
        checks |= _cluster_checks()
        detailed = may_read_metrics(request)
    except DatabaseError:
        checks["database"] = {"ok": False, "message": _("The database does not answer.")}
    ready = all(check["ok"] for check in checks.values())
    answer = {"ready": ready, "checks": checks} if detailed else {"ready": ready}
    return JsonResponse(answer, status=200 if ready else 503)


def _cluster_checks() -> dict[str, dict[str, Any]]:
    """Per enabled cluster: does an engine work on it, and did the cluster answer it?"""
    now = timezone.now()
    checks: dict[str, dict[str, Any]] = {}
    statuses = ClusterStatus.objects.filter(cluster__enabled=True).select_related("cluster")
    for status in statuses:
        engine_alive = bool(status.last_pass_at and now - status.last_pass_at < ENGINE_STALE_AFTER)
        answers = bool(status.last_ok_at and now - status.last_ok_at < ENGINE_STALE_AFTER)
        check: dict[str, Any] = {"ok": engine_alive and answers}
        if not engine_alive:
            check["message"] = _("No engine has worked on this cluster lately.")
        elif not answers:
            check["message"] = _("This cluster does not answer.")
        checks[f"cluster:{status.cluster.name}"] = check
    return checks


def error_page(status: int, title: str, sentence: str, request: HttpRequest) -> HttpResponse:
    context = {"status": status, "title": title, "sentence": sentence}
    return render(request, "error.html", context, status=status)


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api(request):
        return problems.plain_problem(400, request)
    return error_page(
        400,
        _("This request could not be understood"),
        _("Go back, reload the page and try again."),
        request,
    )


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api(request):
        return problems.plain_problem(403, request)
    return error_page(
        403,
        _("You may not do this"),
        _("Ask an administrator of the namespace for access, or sign in as someone else."),
        request,
    )


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if problems.is_api(request):
        return problems.plain_problem(404, request)
    return error_page(
        404,
        _("There is nothing here"),
        _("The address is wrong, it was deleted, or you may not see it."),
        request,
    )


def server_error(request: HttpRequest) -> HttpResponse:
    """Kept free of the database and of context processors: either may be what failed."""
    if problems.is_api(request):
        return problems.plain_problem(500, request)
    return HttpResponse(render_to_string("500.html"), status=500)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    return error_page(
        403,
        _("This page was open for too long"),
        _("Your session changed meanwhile. Go back, reload the page and send it again."),
        request,
    )
