"""Sign-in with rate limits, and the language and theme preferences."""

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
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST

from accounts.models import User
from core.api.throttle import buckets

# Per minute. A whole lab may share one address, so the limit per address is higher.
SIGN_INS_PER_NAME_PER_MINUTE = 10
SIGN_INS_PER_ADDRESS_PER_MINUTE = 60
PREFERENCE_MAX_AGE_S = 365 * 24 * 3600
THEME_COOKIE = "sluice_theme"


def set_preference_cookie(response: HttpResponse, name: str, value: str) -> None:
    response.set_cookie(
        name, value, max_age=PREFERENCE_MAX_AGE_S, samesite="Lax", secure=settings.BEHIND_TLS
    )


class SignInView(LoginView):
    """The login page. Sign-in applies the person's saved language and theme."""

    redirect_authenticated_user = True

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        # Normalized as the form does, so that spellings of one name share a limit.
        name = unicodedata.normalize("NFKC", request.POST.get("username", "")).strip()[:150]
        address = request.META.get("REMOTE_ADDR", "")
        limits = (
            (f"sign-in:{name}", SIGN_INS_PER_NAME_PER_MINUTE),
            (f"sign-in-from:{address}", SIGN_INS_PER_ADDRESS_PER_MINUTE),
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
    """Redirect to the only sign-in page: the admin site's own has no rate limit."""
    if request.user.is_authenticated:
        if not request.user.is_staff:
            raise PermissionDenied
        return HttpResponseRedirect(reverse("admin:index"))
    query = urlencode({"next": request.GET.get("next", "")})
    return HttpResponseRedirect(f"{reverse('login')}?{query}")


@require_POST
def set_preferences(request: HttpRequest) -> HttpResponse:
    """Set language and theme; stored with the person when signed in."""
    next_url = request.POST.get("next", "")
    if not url_has_allowed_host_and_scheme(
        next_url, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    ):
        next_url = "/"
    parts = urlsplit(next_url)
    # One leading slash: a browser reads a path that begins with two as another host.
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
