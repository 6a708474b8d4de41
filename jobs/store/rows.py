"""Rows of jobs for lists and single looks, by SQL of our own: the ORM takes ten times as long to compile
and convert them.

Values are as the database driver gives them (SQLite: text and 0/1; PostgreSQL: typed); the readers below
make values of them. Whose rows may be seen was decided by the caller.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson
from django.contrib.auth import get_user_model
from django.db import connection

from clusters.models import Cluster, ClusterStatus, Namespace
from jobs.models import Attempt, Job

Row = tuple[Any, ...]

# Name → where it comes from: j job, o owner, n namespace, c cluster, s the cluster's status.
_COLUMN_SOURCES: Mapping[str, str] = {
    "id": "j.id",
    "name": "j.name",
    "owner_id": "j.owner_id",
    "owner": "o.username",
    "namespace_id": "j.namespace_id",
    "namespace": "n.name",
    "namespace_active": "n.active",
    "cluster": "c.name",
    "cluster_enabled": "c.enabled",
    "seen_at": "s.last_ok_at",
    "state": "j.state",
    "wanted": "j.wanted",
    "reason_code": "j.reason_code",
    "reason_params": "j.reason_params",
    "reason_text": "j.reason_text",
    "exit_code": "j.exit_code",
    "description": "j.description",
    "labels": "j.labels",
    "created_at": "j.created_at",
    "submitted_at": "j.submitted_at",
    "started_at": "j.started_at",
    "ended_at": "j.ended_at",
    "expected_start": "j.expected_start",
    "time_limit_s": "j.time_limit_s",
    "wanted_time_limit_s": "j.wanted_time_limit_s",
    "attempt": "j.attempt_number",
    "slurm_job_id": "",  # the current attempt's: a subquery
    "cpus": "j.cpus",
    "mem_mib": "j.mem_mib",
    "gpus": "j.gpus",
    "gpu_type": "j.gpu_type",
    "nodes": "j.node_count",
    "tasks": "j.task_count",
    "is_distributed": "j.is_distributed",
    "has_secrets": "j.has_secrets",
    "cloned_from": "j.cloned_from",
}
COLUMNS = tuple(_COLUMN_SOURCES)
OWNER_ID, NAMESPACE_ID = COLUMNS.index("owner_id"), COLUMNS.index("namespace_id")
DETAIL_COLUMNS = ("warnings", "plan")


@lru_cache(maxsize=16)
def quoted_table(model: Any) -> str:
    return connection.ops.quote_name(model._meta.db_table)


@lru_cache(maxsize=4)
def _select(vendor: str, details: tuple[str, ...]) -> str:
    slurm_id = (
        f"(SELECT a.slurm_job_id FROM {quoted_table(Attempt)} a "
        "WHERE a.job_id = j.id AND a.number = j.attempt_number)"
    )
    columns = [_column_sql(source, vendor) or slurm_id for source in _COLUMN_SOURCES.values()]
    columns += [f"j.{name}" for name in details]
    return (
        f"SELECT {', '.join(columns)} FROM {quoted_table(Job)} j "
        f"JOIN {quoted_table(get_user_model())} o ON o.id = j.owner_id "
        f"JOIN {quoted_table(Namespace)} n ON n.id = j.namespace_id "
        f"JOIN {quoted_table(Cluster)} c ON c.id = j.cluster_id "
        f"LEFT JOIN {quoted_table(ClusterStatus)} s ON s.cluster_id = j.cluster_id "
        "WHERE j.deleted_at IS NULL AND "
    )


def _column_sql(source: str, vendor: str) -> str:
    # SQLite keeps times as text; without the cast Django would parse each, and the answer's text be made anew.
    is_datetime = source.endswith("_at") or source == "j.expected_start"
    return f"CAST({source} AS TEXT)" if vendor == "sqlite" and is_datetime else source


def execute(sql: str, params: Sequence[Any], width: int) -> list[Row]:
    """All rows of a SELECT of `width` columns.

    From SQLite they come as one JSON text: its driver gives the interpreter's lock away at every row, and
    among many threads each time waits to get it back. That halved what a process can serve.
    """
    as_json = connection.vendor == "sqlite"
    with connection.cursor() as cursor:
        if not as_json:
            cursor.execute(sql, params)
            return list(cursor.fetchall())
        names = ", ".join(f"c{place}" for place in range(width))
        cursor.execute(
            f"WITH found({names}) AS ({sql}) SELECT json_group_array(json_array({names})) FROM found",
            params,
        )
        return [tuple(row) for row in orjson.loads(cursor.fetchone()[0])]


def fetch_rows(ids: Sequence[Any]) -> list[Row]:
    """The rows of these ids (as the driver gave or takes them), in their order."""
    if not ids:
        return []
    marks = ", ".join(["%s"] * len(ids))
    sql = _select(connection.vendor, ()) + f"j.id IN ({marks})"
    found = execute(sql, ids, len(COLUMNS))
    by_id = {row[0]: row for row in found}
    # One that was deleted between the two looks is simply not there.
    return [by_id[id] for id in ids if id in by_id]


def fetch_row(job_id: uuid.UUID, *, with_details: bool = False) -> tuple[Row, Row] | None:
    """COLUMNS and, if asked, MORE of one job."""
    details = DETAIL_COLUMNS if with_details else ()
    sql = _select(connection.vendor, details) + "j.id = %s"
    found = execute(sql, [id_param(job_id)], len(COLUMNS) + len(details))
    if not found:
        return None
    return found[0][: len(COLUMNS)], found[0][len(COLUMNS) :]


# Values to and from the driver


def id_param(value: uuid.UUID) -> Any:
    return Job._meta.pk.get_db_prep_value(value, connection)


def datetime_param(value: datetime) -> Any:
    return connection.ops.adapt_datetimefield_value(value)


def parse_id(value: Any) -> str:
    """As text with dashes."""
    if isinstance(value, str) and len(value) == 32:
        return f"{value[:8]}-{value[8:12]}-{value[12:16]}-{value[16:20]}-{value[20:]}"
    return str(value)


def parse_datetime(value: Any) -> datetime | None:
    if value is None:
        return None
    found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    # SQLite keeps UTC without saying so.
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def parse_json(value: Any) -> Any:
    if value == "{}":
        return {}
    return json.loads(value) if isinstance(value, str | bytes) else value


def format_iso(value: Any) -> str | None:
    """ISO 8601 in UTC with a Z."""
    if value is None:
        return None
    if isinstance(value, str):
        return value.replace(" ", "T") + "Z"
    if value.tzinfo is None:
        return str(value.isoformat()) + "Z"
    if value.tzinfo is not UTC:
        value = value.astimezone(UTC)
    return str(value.isoformat()[:-6]) + "Z"


def placeholders(values: Iterable[Any]) -> str:
    return ", ".join("%s" for _value in values)
