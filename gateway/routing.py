"""URLs of the websockets."""

from __future__ import annotations

from typing import Any

from django.urls import path, re_path

from jobs.events_consumer import EventsConsumer, UnknownSocketConsumer
from jobs.logs.consumer import LogConsumer

websocket_urlpatterns: list[Any] = [
    path("ws/events", EventsConsumer.as_asgi()),  # type: ignore[arg-type]
    path("ws/jobs/<uuid:job_id>/logs/<str:role>/<int:index>", LogConsumer.as_asgi()),  # type: ignore[arg-type]
    re_path(r"", UnknownSocketConsumer.as_asgi()),  # type: ignore[arg-type]
]
