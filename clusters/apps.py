from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class ClustersConfig(AppConfig):
    name = "clusters"
    verbose_name = _("Clusters and namespaces")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from accounts.web.profile import add_profile_context
        from clusters.passes import register_passes
        from clusters.sync import cluster_passes
        from clusters.web.profile import profile_context

        add_profile_context(profile_context)
        register_passes(cluster_passes)
