"""The one map of addresses."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.views import LogoutView
from django.urls import URLPattern, URLResolver, include, path
from django.views.i18n import JavaScriptCatalog

from gateway import account, views
from jobs.metrics import metrics

urlpatterns: list[URLPattern | URLResolver] = [
    # First, since Django tries one after the other: programs ask far more often than people.
    path("api/v1/", include("gateway.api_urls")),
    path("", include("jobs.web.urls")),
    path("login", views.SignIn.as_view(), name="login"),
    path("logout", LogoutView.as_view(), name="logout"),
    path("profile", account.profile, name="profile"),
    path("profile/password", account.ChangePassword.as_view(), name="password_change"),
    path("tokens", account.tokens, name="tokens"),
    path("tokens/<int:token_id>/revoke", account.revoke, name="token_revoke"),
    path("preferences", views.set_preferences, name="preferences"),
    path(
        "i18n.js", JavaScriptCatalog.as_view(packages=["gateway", "jobs", "clusters"]), name="i18n"
    ),
    path("healthz", views.healthz, name="healthz"),
    path("readyz", views.readyz, name="readyz"),
    path("metrics", metrics, name="metrics"),
    path("admin/login/", views.admin_sign_in),
    path("admin/", admin.site.urls),
]

handler400 = "gateway.views.bad_request"
handler403 = "gateway.views.permission_denied"
handler404 = "gateway.views.not_found"
handler500 = "gateway.views.server_error"
