"""`/api/v1/`: the jobs' own addresses, tokens, the schema and its page."""

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
    # The page and its script are two addresses: nothing inline, nothing from elsewhere.
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
