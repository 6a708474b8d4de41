"""Job rows for lists and single reads: one query joins job, owner, namespace, cluster and current attempt.

The queries are written in SQL, because the ORM takes ten times as long to compile them and convert the rows. `JobRow`
is the only definition of the columns. Values have the same types on SQLite and PostgreSQL. Callers check permissions.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import orjson
from django.contrib.auth import get_user_model
from django.db import connection

from clusters.models import Cluster, ClusterStatus, Namespace
from jobs.models import Attempt, Job

ColumnKind = Literal["plain", "uuid", "time", "json", "bool"]


@dataclass(frozen=True, slots=True)
class Column:
    """The SQL column of a `JobRow` field.

    Tables in `source`: j job, o owner, n namespace, c cluster, s cluster status, a current attempt.
    """

    source: str
    kind: ColumnKind = "plain"


IsoTime = str  # time in UTC as ISO 8601, such as 2026-01-31T18:00:00Z


class JobRow(NamedTuple):
    id: Annotated[str, Column("j.id", "uuid")]
    name: Annotated[str, Column("j.name")]
    owner_id: Annotated[int, Column("j.owner_id")]
    owner: Annotated[str, Column("o.username")]
    namespace_id: Annotated[int, Column("j.namespace_id")]
    namespace: Annotated[str, Column("n.name")]
    namespace_active: Annotated[bool, Column("n.active", "bool")]
    cluster: Annotated[str, Column("c.name")]
    cluster_enabled: Annotated[bool, Column("c.enabled", "bool")]
    seen_at: Annotated[IsoTime | None, Column("s.last_ok_at", "time")]
    state: Annotated[str, Column("j.state")]
    wanted: Annotated[str, Column("j.wanted")]
    reason_code: Annotated[str, Column("j.reason_code")]
    reason_params: Annotated[dict[str, Any], Column("j.reason_params", "json")]
    reason_text: Annotated[str, Column("j.reason_text")]
    exit_code: Annotated[int | None, Column("j.exit_code")]
    description: Annotated[str, Column("j.description")]
    labels: Annotated[dict[str, str], Column("j.labels", "json")]
    created_at: Annotated[IsoTime, Column("j.created_at", "time")]
    submitted_at: Annotated[IsoTime | None, Column("j.submitted_at", "time")]
    started_at: Annotated[IsoTime | None, Column("j.started_at", "time")]
    ended_at: Annotated[IsoTime | None, Column("j.ended_at", "time")]
    expected_start: Annotated[IsoTime | None, Column("j.expected_start", "time")]
    time_limit_s: Annotated[int | None, Column("j.time_limit_s")]
    watched_until: Annotated[IsoTime | None, Column("j.watched_until", "time")]
    kept_task_count: Annotated[int, Column("j.kept_task_count")]
    wanted_time_limit_s: Annotated[int | None, Column("j.wanted_time_limit_s")]
    estimated_duration_s: Annotated[int | None, Column("j.estimated_duration_s")]
    attempt_number: Annotated[int, Column("j.attempt_number")]
    slurm_job_id: Annotated[str | None, Column("a.slurm_job_id")]
    cpus: Annotated[int, Column("j.cpus")]
    mem_mib: Annotated[int, Column("j.mem_mib")]
    gpus: Annotated[int, Column("j.gpus")]
    gpu_type: Annotated[str, Column("j.gpu_type")]
    hourly_price: Annotated[float | None, Column("j.hourly_price")]
    node_count: Annotated[int, Column("j.node_count")]
    task_count: Annotated[int, Column("j.task_count")]
    is_distributed: Annotated[bool, Column("j.is_distributed", "bool")]
    has_secrets: Annotated[bool, Column("j.has_secrets", "bool")]
    cloned_from: Annotated[str | None, Column("j.cloned_from", "uuid")]
    warnings: Annotated[list[dict[str, Any]], Column("j.warnings", "json")]
    plan: Annotated[dict[str, Any], Column("j.plan", "json")]


_COLUMNS: Mapping[str, Column] = {
    name: get_args(annotation)[1]
    for name, annotation in get_type_hints(JobRow, include_extras=True).items()
}
# Columns that lists do not need, only the page of one job. Some are large.
DETAIL_COLUMNS = frozenset({"warnings", "plan", "watched_until"})
LIST_COLUMNS = frozenset(_COLUMNS) - DETAIL_COLUMNS


def fetch_job_rows(
    keys_sql: str, params: Sequence[Any], *, order: str = "", columns: Collection[str]
) -> list[JobRow]:
    """Fetch the rows whose ids `keys_sql` selects. Fields that are not in `columns` are None.

    `order` is an ORDER BY clause on columns of the job table, which has the alias `j`.
    """
    sql = _build_select(connection.vendor, frozenset(columns)).format(keys=keys_sql, order=order)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        if connection.vendor == "sqlite":
            return [JobRow._make(row) for row in orjson.loads(cursor.fetchone()[0])]
        converters = [_CONVERTERS[column.kind] for column in _COLUMNS.values()]
        return [
            JobRow._make(
                value if value is None or convert is None else convert(value)
                for convert, value in zip(converters, row, strict=True)
            )
            for row in cursor.fetchall()
        ]


def fetch_job_rows_by_id(job_ids: Sequence[uuid.UUID], *, columns: Collection[str]) -> list[JobRow]:
    """Fetch the rows of these jobs, in any order. Jobs that do not exist or are deleted have none."""
    if not job_ids:
        return []
    keys = (
        f"SELECT id FROM {quoted_table(Job)} "  # noqa: S608
        f"WHERE id IN ({', '.join(['%s'] * len(job_ids))}) AND deleted_at IS NULL"
    )
    prepare = Job._meta.pk.get_db_prep_value
    return fetch_job_rows(keys, [prepare(id, connection) for id in job_ids], columns=columns)


@lru_cache(maxsize=16)
def quoted_table(model: Any) -> str:
    return connection.ops.quote_name(model._meta.db_table)


@lru_cache(maxsize=256)
def _build_select(vendor: str, columns: frozenset[str]) -> str:
    """Build the SELECT statement with placeholders {keys} and {order}. Joins only tables with a requested column."""
    sources = [column.source if name in columns else "NULL" for name, column in _COLUMNS.items()]
    # SQLite does not reorder the tables of a CROSS JOIN, so that the rows already have the order of the keys. An ORDER
    # BY would copy the whole rows.
    join, order = ("CROSS JOIN", "") if vendor == "sqlite" else ("JOIN", "{order}")
    joins = {
        "o": f"{join} {quoted_table(get_user_model())} o ON o.id = j.owner_id",
        "n": f"{join} {quoted_table(Namespace)} n ON n.id = j.namespace_id",
        "c": f"{join} {quoted_table(Cluster)} c ON c.id = j.cluster_id",
        "s": f"LEFT JOIN {quoted_table(ClusterStatus)} s ON s.cluster_id = j.cluster_id",
        "a": f"LEFT JOIN {quoted_table(Attempt)} a"
        " ON a.job_id = j.id AND a.number = j.attempt_number",
    }
    used = {source.partition(".")[0] for source in sources}
    joined = " ".join(sql for alias, sql in joins.items() if alias in used)
    select = (
        f"SELECT {', '.join(sources)} FROM ({{keys}}) k "  # noqa: S608
        f"{join} {quoted_table(Job)} j ON j.id = k.id {joined} {order}"
    )
    return _select_as_json(select, columns) if vendor == "sqlite" else select


def _select_as_json(select: str, columns: frozenset[str]) -> str:
    """Wrap a query so that SQLite converts the values and returns the whole result as one JSON text.

    Python's SQLite driver releases the interpreter lock (GIL) for every row and then waits to get it back. With
    many threads this halved the number of requests that a process can serve.
    """
    names = [f"c{index}" for index in range(len(_COLUMNS))]
    values = [
        _SQLITE_EXPRESSIONS[column.kind].format(c=name) if field in columns else "NULL"
        for name, (field, column) in zip(names, _COLUMNS.items(), strict=True)
    ]
    return (
        f"WITH found({', '.join(names)}) AS ({select}) "  # noqa: S608
        f"SELECT json_group_array(json_array({', '.join(values)})) FROM found"
    )


# Expressions that convert SQLite's values. It stores UUIDs as 32 hexadecimal digits, times as text in UTC without
# offset, JSON as text, and booleans as 0 and 1.
_SQLITE_EXPRESSIONS: Mapping[ColumnKind, str] = {
    "plain": "{c}",
    "uuid": "substr({c}, 1, 8) || '-' || substr({c}, 9, 4) || '-' || substr({c}, 13, 4) || '-' || "
    "substr({c}, 17, 4) || '-' || substr({c}, 21)",
    "time": "replace({c}, ' ', 'T') || 'Z'",
    "json": "json({c})",
    "bool": "json(iif({c}, 'true', 'false'))",
}


def _format_time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat()[:-6] + "Z"


def _parse_json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str | bytes) else value


# Functions that convert PostgreSQL's values. Its driver returns Python types, except that raw cursors return JSON as
# text.
_CONVERTERS: Mapping[ColumnKind, Callable[[Any], Any] | None] = {
    "plain": None,
    "uuid": str,
    "time": _format_time,
    "json": _parse_json,
    "bool": None,
}
