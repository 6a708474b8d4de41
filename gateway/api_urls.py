"""URLs below `/api/v1/`: jobs, tokens, the schema and its page."""

from __future__ import annotations

from django.urls import include, path
from drf_spectacular.views import SpectacularSwaggerSplitView

from accounts.api import TokenListView, TokenView
from core.api.schema import schema

urlpatterns = [
    path("", include("jobs.api.urls")),
    path("tokens", TokenListView.as_view(), name="api-tokens"),
    path("tokens/<int:id>", TokenView.as_view(), name="api-token"),
    path("schema", schema, name="api-schema"),
    # Page and script are separate URLs: the Content-Security-Policy forbids inline scripts and other hosts.
    path(
        "docs",
        SpectacularSwaggerSplitView.as_view(
            url_name="api-schema",
            authentication_classes=[],
            permission_classes=[],
            throttle_classes=[],
        ),
        name="api-docs",
    ),
]
