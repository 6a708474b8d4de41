"""The ASGI application: Django handles HTTP, Channels handles websockets."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from django import setup

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")

setup(set_prefix=False)

# These modules import models, which is possible only after django.setup().
from accounts.websockets import SocketAuthMiddleware  # noqa: E402
from gateway.routing import websocket_urlpatterns  # noqa: E402
from gateway.threads import ThreadedHandler  # noqa: E402

http_handler = ThreadedHandler()
application = ProtocolTypeRouter(
    {"http": http_handler, "websocket": SocketAuthMiddleware(URLRouter(websocket_urlpatterns))}
)
