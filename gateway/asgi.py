"""The ASGI application: HTTP by Django, websockets by Channels."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")

http = get_asgi_application()

# Only after Django is set up: these import models.
from jobs.routing import websocket_urlpatterns  # noqa: E402
from jobs.sockets import SocketGuard  # noqa: E402

application = ProtocolTypeRouter(
    {"http": http, "websocket": SocketGuard(URLRouter(websocket_urlpatterns))}
)
