"""Lists of jobs: filter, sort and page. The API and the pages use the same functions.

Pages continue after the last row's key, never by offset, so a page costs the same however many jobs exist.
A list is the union of branches that each walk one index: the person's own jobs and those of each namespace.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from django.contrib.auth import get_user_model
from django.db import connection
from django.db.models import Q, QuerySet, TextField
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast
from django.db.models.lookups import Exact, IsNull

from clusters.models import Namespace
from jobs.models import Attempt, Job
from jobs.store.access import JobAccess, any_branch, job_access, visibility_branches
from jobs.store.job_rows import (
    LIST_COLUMNS,
    JobRow,
    fetch_job_row,
    fetch_job_rows,
    quoted_table,
)

if TYPE_CHECKING:
    from jobs.store.access import Person

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000
# With more branches the union costs more than one scan.
MAX_BRANCHES = 24
# Sort key of the API → column; a leading "-" means descending.
SORT_COLUMNS: Mapping[str, str] = {
    "created": "created_at",
    "submitted": "submitted_at",
    "started": "started_at",
    "ended": "ended_at",
    "name": "name",
    "state": "state",
    "cpus": "cpus",
    "mem": "mem_mib",
    "gpus": "gpus",
}
_NULLABLE = frozenset({"submitted_at", "started_at", "ended_at"})


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Conditions and order of a list. The default is every visible job, newest first."""

    states: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    mine: bool = False
    name: str = ""
    q: str = ""
    ids: tuple[uuid.UUID, ...] = ()
    slurm_id: str = ""
    gpu_type: str = ""
    distributed: bool | None = None
    labels: tuple[tuple[str, str | None], ...] = ()
    ranges: Mapping[str, tuple[datetime | None, datetime | None]] = field(default_factory=dict)
    sort: str = "-created"

    @property
    def column(self) -> str:
        return SORT_COLUMNS[self.sort.removeprefix("-")]

    @property
    def descending(self) -> bool:
        return self.sort.startswith("-")


PageKey: TypeAlias = tuple[Any, uuid.UUID]  # value of the sort column, id


@dataclass(frozen=True, slots=True)
class JobPage:
    rows: list[JobRow]
    next_key: PageKey | None
    access: JobAccess


def list_jobs_page(
    user: Person,
    job_filter: JobFilter,
    *,
    after: PageKey | None = None,
    limit: int = DEFAULT_LIMIT,
    columns: Collection[str] = LIST_COLUMNS,
) -> JobPage:
    """One page in two queries: the person's roles, the rows."""
    access = job_access(user)
    branches = _branches(access, job_filter)
    if not branches:
        return JobPage([], None, access)
    keys_sql, params = _page_keys(branches, job_filter, after, limit + 1)
    wanted = {*columns, "id", job_filter.column}
    order = _order_by(job_filter, "j.")
    rows = fetch_job_rows(keys_sql, params, order=order, columns=wanted)
    next_key = None
    if len(rows) > limit:
        rows = rows[:limit]
        next_key = _page_key(rows[-1], job_filter)
    return JobPage(rows, next_key, access)


def count_jobs(user: Person, job_filter: JobFilter) -> int:
    branches = _branches(job_access(user), job_filter)
    jobs = Job.objects.not_deleted().filter(_conditions(job_filter), any_branch(branches))
    return jobs.count()


def find_job_row(
    user: Person, job_id: uuid.UUID, *, columns: Collection[str] = LIST_COLUMNS
) -> tuple[JobRow, JobAccess] | None:
    """One job's row and the person's access; None if they may not see it."""
    row = fetch_job_row(job_id, columns={*columns, "owner_id", "namespace_id"})
    if row is None:
        return None
    access = job_access(user)
    visible = access.sees(owner_id=row.owner_id, namespace_id=row.namespace_id)
    return (row, access) if visible else None


Branch: TypeAlias = Mapping[str, Any]  # column → value; empty: every job


def _branches(access: JobAccess, job_filter: JobFilter) -> list[Branch]:
    """The visible jobs in the wanted states, as alternatives that an index serves."""
    visible: list[Branch] = list(visibility_branches(access.visibility))
    if visible and job_filter.mine:
        visible = [{"owner_id": access.user.pk}]
    states: list[Branch] = [{"state": state} for state in job_filter.states] or [{}]
    return [{**branch, **state} for branch in visible for state in states]


def _page_keys(
    branches: Sequence[Branch], job_filter: JobFilter, after: PageKey | None, limit: int
) -> tuple[str, list[Any]]:
    """SQL that selects the ids of a page, and its parameters."""
    conditions = _conditions(job_filter)
    if after is not None:
        conditions &= _after_key(job_filter, after)
    if len(branches) > MAX_BRANCHES:
        conditions &= any_branch(branches)
        branches = [{}]
    where, where_params = _compile(conditions)
    order = f"{_order_by(job_filter)} LIMIT {limit}"
    columns = f"id, {job_filter.column}"
    selects, params = [], list[Any]()
    for branch in branches:
        branch_where = "".join(f" AND {column} = %s" for column in branch)
        selects.append(
            f"SELECT {columns} FROM {quoted_table(Job)} WHERE {where}{branch_where} {order}"
        )
        params += [*where_params, *branch.values()]
    if len(selects) == 1:
        return selects[0], params
    # UNION removes duplicates: a person's own job in a namespace of which the person is a member.
    union = " UNION ".join(f"SELECT * FROM ({select}) b{n}" for n, select in enumerate(selects))
    return f"SELECT {columns} FROM ({union}) u {order}", params


def _compile(conditions: Q) -> tuple[str, list[Any]]:
    """Conditions on the job table alone, compiled once for all branches."""
    query = Job.objects.not_deleted().filter(conditions).query
    where, params = query.get_compiler(connection=connection).compile(query.where)
    return where, list(params)


def _order_by(job_filter: JobFilter, prefix: str = "") -> str:
    """Jobs without a value of the sort column come last in both directions."""
    column, direction = job_filter.column, "DESC" if job_filter.descending else "ASC"
    nulls = " NULLS LAST" if column in _NULLABLE else ""
    return f"ORDER BY {prefix}{column} {direction}{nulls}, {prefix}id {direction}"


def _page_key(row: JobRow, job_filter: JobFilter) -> PageKey:
    value = getattr(row, job_filter.column)
    if value is not None and job_filter.column.endswith("_at"):
        value = datetime.fromisoformat(value)
    return value, uuid.UUID(row.id)


def _after_key(job_filter: JobFilter, key: PageKey) -> Q:
    value, last_id = key
    column, comparison = job_filter.column, "lt" if job_filter.descending else "gt"
    later_id = Q(**{f"id__{comparison}": last_id})
    if value is None:
        return Q(**{f"{column}__isnull": True}) & later_id
    later = Q(**{f"{column}__{comparison}": value}) | Q(**{column: value}) & later_id
    # The redundant bound lets an index scan start at the key.
    after_key = Q(**{f"{column}__{comparison}e": value}) & later
    return after_key | Q(**{f"{column}__isnull": True}) if column in _NULLABLE else after_key


def _conditions(job_filter: JobFilter) -> Q:
    """The filter without states and visibility. Other tables appear only in subqueries."""
    conditions = Q()
    if job_filter.namespaces:
        names = Namespace.objects.filter(name__in=job_filter.namespaces)
        conditions &= Q(namespace__in=names.values("pk"))
    if job_filter.owners:
        people = get_user_model()._default_manager.filter(username__in=job_filter.owners)
        conditions &= Q(owner__in=people.values("pk"))
    if job_filter.slurm_id:
        conditions &= Q(pk__in=_by_slurm_id(job_filter.slurm_id))
    for lookup, wanted in (
        ("pk__in", job_filter.ids or None),
        ("name", job_filter.name or None),
        ("gpu_type", job_filter.gpu_type or None),
        ("is_distributed", job_filter.distributed),
    ):
        if wanted is not None:
            conditions &= Q(**{lookup: wanted})
    for column, (since, until) in job_filter.ranges.items():
        if since is not None:
            conditions &= Q(**{f"{column}__gte": since})
        if until is not None:
            conditions &= Q(**{f"{column}__lt": until})
    for word in job_filter.q.split():
        conditions &= _match_word(word)
    for key, value in job_filter.labels:
        label = Cast(KeyTextTransform(key, "labels"), TextField())
        conditions &= Q(IsNull(label, False) if value is None else Exact(label, value))
    return conditions


def _by_slurm_id(slurm_id: str) -> QuerySet[Attempt, Any]:
    """A component's id (`123+0`) also finds its job."""
    whole = slurm_id.partition("+")[0]
    return Attempt.objects.filter(slurm_job_id__in={slurm_id, whole}).values("job_id")


def _match_word(word: str) -> Q:
    """One word of a search: part of the name, the description or the owner's name, or an id."""
    found = Q(name__icontains=word) | Q(description__icontains=word)
    # A subquery runs once; a join would compare the name for every row.
    people = get_user_model()._default_manager.filter(username__icontains=word)
    found |= Q(owner__in=people.values("pk"))
    compact = word.replace("-", "").lower()
    if 6 <= len(compact) <= 32 and all(c in "0123456789abcdef" for c in compact):
        low, high = compact.ljust(32, "0"), compact.ljust(32, "f")
        found |= Q(pk__gte=uuid.UUID(low), pk__lte=uuid.UUID(high))
    if word[0].isdigit() and word.replace("+", "").isdigit() and len(word) <= 40:
        found |= Q(pk__in=_by_slurm_id(word))
    return found
