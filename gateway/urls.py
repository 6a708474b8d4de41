"""All URLs; those of the API and of the job pages are included from `gateway.api_urls` and `jobs.web.urls`."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import URLPattern, URLResolver, include, path
from django.views.decorators.http import conditional_page, require_safe
from django.views.generic import RedirectView
from django.views.i18n import JavaScriptCatalog

from accounts.web import profile, sign_in
from gateway import front_views, health
from gateway.prometheus import metrics

catalog_view = JavaScriptCatalog.as_view(
    packages=["core", "accounts", "clusters", "jobs", "gateway"]
)

urlpatterns: list[URLPattern | URLResolver] = [
    # The API comes first: Django tries the patterns in order, and most requests are API requests.
    path("api/v1/", include("gateway.api_urls")),
    path("", include("jobs.web.urls")),
    path("login", sign_in.SignInView.as_view(), name="login"),
    path("logout", LogoutView.as_view(), name="logout"),
    path("profile", profile.profile_page, name="profile"),
    path("profile/password", profile.ChangePasswordView.as_view(), name="password_change"),
    path("tokens", profile.tokens_page, name="tokens"),
    path("tokens/<int:token_id>/revoke", profile.revoke_token_view, name="token_revoke"),
    path("preferences", sign_in.set_preferences, name="preferences"),
    path(
        "i18n.js",
        require_safe(conditional_page(catalog_view)),
        name="i18n",
    ),
    path("healthz", health.healthz, name="healthz"),
    path("readyz", health.readyz, name="readyz"),
    path("metrics", metrics, name="metrics"),
    path("front/authenticate", front_views.AuthenticateView.as_view(), name="front-authenticate"),
    path("admin/login/", sign_in.admin_sign_in),
    # Django's own form neither limits guesses of the old password nor offers to revoke the tokens.
    path("admin/password_change/", RedirectView.as_view(pattern_name="password_change")),
    path("admin/", admin.site.urls),
]

handler400 = "gateway.error_pages.bad_request"
handler403 = "gateway.error_pages.permission_denied"
handler404 = "gateway.error_pages.not_found"
handler500 = "gateway.error_pages.server_error"
