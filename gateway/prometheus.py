"""`/metrics` for Prometheus: jobs by state, the engine's polls, the age of the data.

All metrics except the number of websockets come from the database, so every web process reports all engines. Requests
with the bearer token METRICS_TOKEN and administrators' sessions are allowed. The client's address proves nothing: every
account on this machine, and every client of a proxy on it, connects from loopback.
"""

from __future__ import annotations

from collections.abc import Iterable
from secrets import compare_digest

from django.conf import settings
from django.db.models import Count
from django.http import HttpRequest, HttpResponse, HttpResponseForbidden
from django.utils import timezone
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accounts.websockets import count_open_sockets
from clusters.models import ClusterStatus, EngineLease
from jobs.lifecycle.states import JobState
from jobs.models import Job


class SluiceCollector(Collector):
    """Reads the metrics from the database, for one request."""

    def collect(self) -> Iterable[Metric]:
        yield self._jobs()
        yield from self._clusters()
        yield from self._engines()
        sockets = GaugeMetricFamily("sluice_websockets", "Open websockets of this web process")
        sockets.add_metric([], count_open_sockets())
        yield sockets

    @staticmethod
    def _jobs() -> Metric:
        metric = GaugeMetricFamily(
            "sluice_jobs", "Jobs that are not deleted, by state", labels=["cluster", "state"]
        )
        by_state = Job.objects.not_deleted().values_list("cluster__name", "state").order_by()
        counts = {(name, state): count for name, state, count in by_state.annotate(Count("pk"))}
        for name in sorted({name for name, _state in counts}):
            for state in JobState:
                metric.add_metric([name, state.value], counts.get((name, state.value), 0))
        return metric

    @staticmethod
    def _clusters() -> Iterable[Metric]:
        age = GaugeMetricFamily(
            "sluice_data_age_seconds", "Seconds since Slurm last answered", labels=["cluster"]
        )
        idle = GaugeMetricFamily(
            "sluice_engine_idle_seconds", "Seconds since the engine's last pass", labels=["cluster"]
        )
        now = timezone.now()
        for status in ClusterStatus.objects.select_related("cluster"):
            name = status.cluster.name
            if (seconds := status.age_s(now)) is not None:
                age.add_metric([name], seconds)
            if status.last_pass_at is not None:
                idle.add_metric([name], (now - status.last_pass_at).total_seconds())
        return [age, idle]

    @staticmethod
    def _engines() -> Iterable[Metric]:
        passes = CounterMetricFamily(
            "sluice_engine_passes",
            "Polls of Slurm since this engine became leader",
            labels=["cluster"],
        )
        seconds = CounterMetricFamily(
            "sluice_engine_pass_seconds", "Total duration of polls", labels=["cluster"]
        )
        last_pass = GaugeMetricFamily(
            "sluice_engine_last_pass_seconds", "Duration of the last poll", labels=["cluster"]
        )
        last_read = GaugeMetricFamily(
            "sluice_engine_last_read_seconds",
            "Part of the last poll spent in squeue and sacct",
            labels=["cluster"],
        )
        takeovers = CounterMetricFamily(
            "sluice_engine_takeovers", "Changes of the leader", labels=["cluster"]
        )
        commands = CounterMetricFamily(
            "sluice_engine_commands", "Commands run on the cluster", labels=["cluster", "command"]
        )
        failures = CounterMetricFamily(
            "sluice_engine_failures", "Failures, by kind", labels=["cluster", "kind"]
        )
        for lease in EngineLease.objects.select_related("cluster"):
            name, stats = lease.cluster.name, lease.stats
            takeovers.add_metric([name], lease.fence)
            passes.add_metric([name], stats.get("passes", 0))
            seconds.add_metric([name], stats.get("passSecondsTotal", 0))
            last_pass.add_metric([name], stats.get("lastPassS", 0))
            last_read.add_metric([name], stats.get("lastReadS", 0))
            for command, count in stats.get("commands", {}).items():
                commands.add_metric([name, command], count)
            for kind, count in stats.get("failures", {}).items():
                failures.add_metric([name, kind], count)
        return [passes, seconds, last_pass, last_read, takeovers, commands, failures]


def can_read_metrics(request: HttpRequest) -> bool:
    """Whether the request has the metrics token or an administrator's session."""
    scheme, _space, token = request.headers.get("Authorization", "").partition(" ")
    if settings.METRICS_TOKEN and scheme.lower() == "bearer":
        return compare_digest(token.strip().encode(), settings.METRICS_TOKEN.encode())
    user = request.user
    return user.is_authenticated and user.is_active and user.is_superuser


@require_safe
def metrics(request: HttpRequest) -> HttpResponse:
    if not can_read_metrics(request):
        return HttpResponseForbidden("Metrics need the bearer token of SLUICE_METRICS_TOKEN.\n")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SluiceCollector())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)
