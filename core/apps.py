from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class CoreConfig(AppConfig):
    name = "core"
    verbose_name = _("Events")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from core.api.idempotency import select_expired_keys
        from core.events.records import select_expired_events
        from core.housekeeping import register_expired_rows
        from core.limits import select_expired_counts, select_unused_buckets

        register_expired_rows("events", select_expired_events)
        register_expired_rows("idempotency keys", select_expired_keys)
        register_expired_rows("rate limits", select_unused_buckets)
        register_expired_rows("requests at once", select_expired_counts)
