from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class EngineConfig(AppConfig):
    name = "engine"
    verbose_name = _("Engine")
    default_auto_field = "django.db.models.BigAutoField"
