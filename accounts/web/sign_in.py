"""Views for sign-in, with rate limits, and for a person's preferences: language and theme."""

from __future__ import annotations

import math
import unicodedata
from typing import Any
from urllib.parse import urlencode, urlsplit

from django.conf import settings
from django.contrib.auth.views import LoginView
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import check_for_language
from django.views.decorators.http import require_POST

from accounts.models import User
from core.api.throttle import rate_limit_buckets

# Many people may share one IP address, so the limit per address is higher than the limit per user name.
SIGN_INS_PER_NAME_PER_MINUTE = 10
SIGN_INS_PER_ADDRESS_PER_MINUTE = 60
PREFERENCE_COOKIE_MAX_AGE_S = 365 * 24 * 3600
THEME_COOKIE = "sluice_theme"


def set_preference_cookie(response: HttpResponse, name: str, value: str) -> None:
    response.set_cookie(
        name, value, max_age=PREFERENCE_COOKIE_MAX_AGE_S, samesite="Lax", secure=settings.BEHIND_TLS
    )


def set_saved_preference_cookies(response: HttpResponse, user: User) -> None:
    if user.language:
        set_preference_cookie(response, settings.LANGUAGE_COOKIE_NAME, user.language)
    set_preference_cookie(response, THEME_COOKIE, user.theme)


class SignInView(LoginView):
    """The login page. After sign-in it sets the cookies of the person's saved language and theme."""

    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        # Normalized as by Django's form, so that different spellings of one name have one limit.
        name = unicodedata.normalize("NFKC", request.POST.get("username", "")).strip()[:150]
        address = request.META.get("REMOTE_ADDR", "")
        limits = (
            (f"sign-in:{name}", SIGN_INS_PER_NAME_PER_MINUTE),
            (f"sign-in-from:{address}", SIGN_INS_PER_ADDRESS_PER_MINUTE),
        )
        for key, per_minute in limits:
            if wait_s := rate_limit_buckets.take(key, per_minute):
                context = self.get_context_data(wait_s=math.ceil(wait_s))
                response = self.render_to_response(context, status=429)
                response["Retry-After"] = str(math.ceil(wait_s))
                return response
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        set_saved_preference_cookies(response, form.get_user())
        return response


def admin_sign_in(request: HttpRequest) -> HttpResponse:
    """Redirect to Sluice's login page. Replaces the login page of the admin site, which has no rate limit."""
    if request.user.is_authenticated:
        if not request.user.is_staff:
            raise PermissionDenied
        return HttpResponseRedirect(reverse("admin:index"))
    query = urlencode({"next": request.GET.get("next", "")})
    return HttpResponseRedirect(f"{reverse('login')}?{query}")


@require_POST
def set_preferences(request: HttpRequest) -> HttpResponse:
    """Set the cookies of language and theme; if a person is signed in, also store both in the person's row."""
    next_url = request.POST.get("next", "")
    if not url_has_allowed_host_and_scheme(
        next_url, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        next_url = "/"
    parts = urlsplit(next_url)
    # Exactly one leading slash: browsers read the text after two leading slashes as a host name.
    path = "/" + parts.path.lstrip("/\\")
    response = HttpResponseRedirect(path + (f"?{parts.query}" if parts.query else ""))
    changes = {}
    language, theme = request.POST.get("language", ""), request.POST.get("theme", "")
    if language in dict(settings.LANGUAGES) and check_for_language(language):
        set_preference_cookie(response, settings.LANGUAGE_COOKIE_NAME, language)
        changes["language"] = language
    if theme in User.Theme.values:
        set_preference_cookie(response, THEME_COOKIE, theme)
        changes["theme"] = theme
    if changes and request.user.is_authenticated:
        User.objects.filter(pk=request.user.pk).update(**changes)
    return response
