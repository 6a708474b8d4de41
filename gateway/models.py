"""People as the web knows them. What they may do on a cluster is decided in `clusters` and `jobs`."""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils.translation import gettext_lazy as _


class User(AbstractUser):
    """A person who signs in. An administrator of Sluice is a superuser."""

    class Theme(models.TextChoices):
        AUTO = "auto", _("As the system")
        LIGHT = "light", _("Light")
        DARK = "dark", _("Dark")

    language = models.CharField(
        _("language"), max_length=10, blank=True, choices=settings.LANGUAGES, default=""
    )
    theme = models.CharField(
        _("theme"), max_length=5, choices=Theme.choices, default=Theme.AUTO.value
    )
