"""Health checks: `/healthz` (this process answers) and `/readyz` (database, engine, clusters)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.views.decorators.http import require_safe

from clusters.models import ClusterStatus
from gateway.prometheus import can_read_metrics

# Passes run every few seconds. If the last pass is older than this, no engine is running; if the last answer of Slurm
# is older, the cluster does not respond.
STALE_AFTER = timedelta(seconds=60)


@require_safe
def healthz(request: HttpRequest) -> HttpResponse:
    """Report that this process responds. Checks nothing else, because restarting it would not repair other failures."""
    return HttpResponse("ok\n", content_type="text/plain")


@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """Report whether the database, the engine and every enabled cluster work.

    Everyone gets the overall result; only those who may read the metrics get the result of each check.
    """
    checks: dict[str, dict[str, Any]] = {}
    detailed = False
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        checks["database"] = {"ok": True}
        checks |= _cluster_checks()
        detailed = can_read_metrics(request)
    except DatabaseError:
        checks["database"] = {"ok": False, "message": _("The database does not answer.")}
    ready = all(check["ok"] for check in checks.values())
    answer = {"ready": ready, "checks": checks} if detailed else {"ready": ready}
    return JsonResponse(answer, status=200 if ready else 503)


def _cluster_checks() -> dict[str, dict[str, Any]]:
    """For each enabled cluster: whether an engine runs its passes and whether the cluster responds."""
    now = timezone.now()
    checks: dict[str, dict[str, Any]] = {}
    statuses = ClusterStatus.objects.filter(cluster__enabled=True).select_related("cluster")
    for status in statuses:
        engine_alive = bool(status.last_pass_at and now - status.last_pass_at < STALE_AFTER)
        responds = bool(status.last_ok_at and now - status.last_ok_at < STALE_AFTER)
        check: dict[str, Any] = {"ok": engine_alive and responds}
        if not engine_alive:
            check["message"] = _("No engine has worked on this cluster lately.")
        elif not responds:
            check["message"] = _("This cluster does not answer.")
        checks[f"cluster:{status.cluster.name}"] = check
    return checks
