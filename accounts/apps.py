from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class AccountsConfig(AppConfig):
    name = "accounts"
    verbose_name = _("People")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from django.contrib.sessions.models import Session
        from django.utils import timezone

        from core.housekeeping import register_expired_rows

        register_expired_rows(
            "sessions",
            lambda: Session.objects.filter(expire_date__lt=timezone.now()).order_by("expire_date"),
        )
