"""URLs below `/api/v1/`: jobs, tokens, the OpenAPI schema and its documentation page."""

from __future__ import annotations

from django.urls import include, path
from django.views.decorators.http import require_safe
from drf_spectacular.views import SpectacularSwaggerSplitView

from accounts.api import TokenListView, TokenView
from core.api.schema import schema_view

# The "split" view serves the page's script at a URL, because the Content-Security-Policy forbids inline scripts.
docs_view = SpectacularSwaggerSplitView.as_view(
    url_name="api-schema", authentication_classes=[], permission_classes=[], throttle_classes=[]
)

urlpatterns = [
    path("", include("jobs.api.urls")),
    path("tokens", TokenListView.as_view(), name="api-tokens"),
    path("tokens/<int:id>", TokenView.as_view(), name="api-token"),
    path("schema", schema_view, name="api-schema"),
    # The view has only a template renderer, with which other methods would fail.
    path("docs", require_safe(docs_view), name="api-docs"),
]
