"""Views for sign-in and for a person's preferences: language and theme."""

from __future__ import annotations

import math
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
from accounts.sign_in_limits import PasswordCheck, limit_password_check, set_device_cookie
from core.errors import TooManyRequests

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
    _check: PasswordCheck

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        name = request.POST.get("username", "")
        try:
            with limit_password_check(request, name) as self._check:
                return super().post(request, *args, **kwargs)
        except TooManyRequests as error:
            # A form without the posted values: it cannot be validated, which would check the password.
            form = self.get_form_class()(request, initial={"username": name[:150]})
            wait_s = math.ceil(error.retry_after_s)
            context = self.get_context_data(form=form, wait_s=wait_s)
            response = self.render_to_response(context, status=429)
            response["Retry-After"] = str(wait_s)
            return response

    def form_valid(self, form: Any) -> HttpResponse:
        self._check.password_was_right()
        response = super().form_valid(form)
        set_saved_preference_cookies(response, form.get_user())
        set_device_cookie(response, form.get_user().get_username(), path=self.request.path)
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
