"""Lists of jobs: filter, sort and paginate. The REST API and the web pages use the same functions.

A page begins after the key of the previous page's last row, not at an offset, so that every page takes the same time
however many jobs exist. The query of a list is a union of branches: one for the person's own jobs and one for the jobs
of each of the person's namespaces, each once per requested state. The database answers each branch from one index.
`_build_branches` builds these conditions on visibility and state, `_build_conditions` the other conditions of a filter.
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
from jobs.store.access import JobAccess, load_job_access, match_any_branch, visibility_branches
from jobs.store.job_rows import (
    LIST_COLUMNS,
    JobRow,
    fetch_job_rows,
    fetch_job_rows_by_id,
    quoted_table,
)

if TYPE_CHECKING:
    from jobs.store.access import Person

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000
# A union of more branches costs more than one scan of the table.
MAX_UNION_BRANCHES = 24
# Sort key in the REST API → column. In a request, a leading "-" of the key means descending order.
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
_NULLABLE_SORT_COLUMNS = frozenset({"submitted_at", "started_at", "ended_at"})


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Conditions and order of a list. The default is every visible job, newest first."""

    states: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    mine: bool = False  # only the person's own jobs
    name: str = ""  # exact name
    q: str = ""  # words to search for (`_build_word_condition`); each must match
    ids: tuple[uuid.UUID, ...] = ()
    slurm_id: str = ""
    gpu_type: str = ""
    distributed: bool | None = None
    labels: tuple[tuple[str, str | None], ...] = ()  # (key, value); value None: the label exists
    # Time column → (first time, end); None: no limit.
    ranges: Mapping[str, tuple[datetime | None, datetime | None]] = field(default_factory=dict)
    sort: str = "-created"

    @property
    def sort_column(self) -> str:
        return SORT_COLUMNS[self.sort.removeprefix("-")]

    @property
    def is_descending(self) -> bool:
        return self.sort.startswith("-")


# Position of a row in a list: value of the sort column, job id.
PageKey: TypeAlias = tuple[Any, uuid.UUID]


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page of a list."""

    rows: list[JobRow]
    next_key: PageKey | None  # key of the last row; None: this is the last page
    access: JobAccess


def list_jobs_page(
    user: Person,
    job_filter: JobFilter,
    *,
    after: PageKey | None = None,
    limit: int = DEFAULT_PAGE_SIZE,
    columns: Collection[str] = LIST_COLUMNS,
) -> JobPage:
    """Load one page of the jobs that the person sees, beginning after the key `after`.

    Makes two queries: one for the person's roles, one for the rows.
    """
    access = load_job_access(user)
    branches = _build_branches(access, job_filter)
    if not branches:
        return JobPage([], None, access)
    keys_sql, params = _build_page_keys_sql(branches, job_filter, after, limit + 1)
    needed_columns = {*columns, "id", job_filter.sort_column}
    order = _build_order_by(job_filter, "j.")
    rows = fetch_job_rows(keys_sql, params, order=order, columns=needed_columns)
    next_key = None
    if len(rows) > limit:
        rows = rows[:limit]
        next_key = _build_page_key(rows[-1], job_filter)
    return JobPage(rows, next_key, access)


def count_jobs(user: Person, job_filter: JobFilter) -> int:
    branches = _build_branches(load_job_access(user), job_filter)
    jobs = Job.objects.not_deleted().filter(
        _build_conditions(job_filter), match_any_branch(branches)
    )
    return jobs.count()


def find_job_row(
    user: Person, job_id: uuid.UUID, *, columns: Collection[str] = LIST_COLUMNS
) -> tuple[JobRow, JobAccess] | None:
    """Load one job's row and the person's access. None if the person may not see the job."""
    access = load_job_access(user)
    rows = find_job_rows(access, [job_id], columns=columns)
    return (rows[0], access) if rows else None


def find_job_rows(
    access: JobAccess, job_ids: Sequence[uuid.UUID], *, columns: Collection[str]
) -> list[JobRow]:
    """Load the rows of the jobs that the person may see, in the order of the ids."""
    rows = fetch_job_rows_by_id(job_ids, columns={*columns, "id", "owner_id", "namespace_id"})
    by_id = {
        row.id: row
        for row in rows
        if access.sees(owner_id=row.owner_id, namespace_id=row.namespace_id)
    }
    return [by_id[str(id)] for id in job_ids if str(id) in by_id]


# Condition on a job: column → required value. An empty branch matches every job.
Branch: TypeAlias = Mapping[str, Any]


def _build_branches(access: JobAccess, job_filter: JobFilter) -> list[Branch]:
    """Build one branch per visibility condition and requested state.

    The list is the union of the branches. There is an index for each, so that the database need not scan the table.
    """
    visible: list[Branch] = list(visibility_branches(access.visibility))
    if visible and job_filter.mine:
        visible = [{"owner_id": access.user.pk}]
    states: list[Branch] = [{"state": state} for state in job_filter.states] or [{}]
    return [{**branch, **state} for branch in visible for state in states]


def _build_page_keys_sql(
    branches: Sequence[Branch], job_filter: JobFilter, after: PageKey | None, limit: int
) -> tuple[str, list[Any]]:
    """Build the SQL that selects the ids and sort values of a page's jobs, and its parameters."""
    conditions = _build_conditions(job_filter)
    if after is not None:
        conditions &= _build_after_key_condition(job_filter, after)
    if len(branches) > MAX_UNION_BRANCHES:
        conditions &= match_any_branch(branches)
        branches = [{}]
    where, where_params = _compile_conditions(conditions)
    order = f"{_build_order_by(job_filter)} LIMIT {limit}"
    columns = f"id, {job_filter.sort_column}"
    selects, params = [], list[Any]()
    for branch in branches:
        branch_where = "".join(f" AND {column} = %s" for column in branch)
        selects.append(
            f"SELECT {columns} FROM {quoted_table(Job)} WHERE {where}{branch_where} {order}"
        )
        params += [*where_params, *branch.values()]
    if len(selects) == 1:
        return selects[0], params
    # A person's own job in one of their namespaces is in two branches; UNION removes the duplicate.
    union = " UNION ".join(f"SELECT * FROM ({select}) b{n}" for n, select in enumerate(selects))
    return f"SELECT {columns} FROM ({union}) u {order}", params


def _compile_conditions(conditions: Q) -> tuple[str, list[Any]]:
    """Compile conditions to SQL and parameters, once for all branches.

    The conditions may use columns of the job table only.
    """
    query = Job.objects.not_deleted().filter(conditions).query
    where, params = query.get_compiler(connection=connection).compile(query.where)
    return where, list(params)


def _build_order_by(job_filter: JobFilter, prefix: str = "") -> str:
    """Build the ORDER BY clause. Jobs without a value in the sort column come last in both directions."""
    column, direction = job_filter.sort_column, "DESC" if job_filter.is_descending else "ASC"
    nulls = " NULLS LAST" if column in _NULLABLE_SORT_COLUMNS else ""
    return f"ORDER BY {prefix}{column} {direction}{nulls}, {prefix}id {direction}"


def _build_page_key(row: JobRow, job_filter: JobFilter) -> PageKey:
    value = getattr(row, job_filter.sort_column)
    if value is not None and job_filter.sort_column.endswith("_at"):
        value = datetime.fromisoformat(value)
    return value, uuid.UUID(row.id)


def _build_after_key_condition(job_filter: JobFilter, key: PageKey) -> Q:
    value, last_id = key
    column, comparison = job_filter.sort_column, "lt" if job_filter.is_descending else "gt"
    later_id = Q(**{f"id__{comparison}": last_id})
    if value is None:
        return Q(**{f"{column}__isnull": True}) & later_id
    later = Q(**{f"{column}__{comparison}": value}) | Q(**{column: value}) & later_id
    # The condition `<=` or `>=` follows from `later`, but only with it the database starts the index scan at the key.
    after_key = Q(**{f"{column}__{comparison}e": value}) & later
    return (
        after_key | Q(**{f"{column}__isnull": True})
        if column in _NULLABLE_SORT_COLUMNS
        else after_key
    )


def _build_conditions(job_filter: JobFilter) -> Q:
    """Build the conditions of a filter, except states and visibility, which `_build_branches` adds.

    Other tables than the job table are used only in subqueries.
    """
    conditions = Q()
    if job_filter.namespaces:
        names = Namespace.objects.filter(name__in=job_filter.namespaces)
        conditions &= Q(namespace__in=names.values("pk"))
    if job_filter.owners:
        people = get_user_model()._default_manager.filter(username__in=job_filter.owners)
        conditions &= Q(owner__in=people.values("pk"))
    if job_filter.slurm_id:
        conditions &= Q(pk__in=_select_jobs_by_slurm_id(job_filter.slurm_id))
    for lookup, value in (
        ("pk__in", job_filter.ids or None),
        ("name", job_filter.name or None),
        ("gpu_type", job_filter.gpu_type or None),
        ("is_distributed", job_filter.distributed),
    ):
        if value is not None:
            conditions &= Q(**{lookup: value})
    for column, (since, until) in job_filter.ranges.items():
        if since is not None:
            conditions &= Q(**{f"{column}__gte": since})
        if until is not None:
            conditions &= Q(**{f"{column}__lt": until})
    for word in job_filter.q.split():
        conditions &= _build_word_condition(word)
    for key, label_value in job_filter.labels:
        label = Cast(KeyTextTransform(key, "labels"), TextField())
        conditions &= Q(IsNull(label, False) if label_value is None else Exact(label, label_value))
    return conditions


def _select_jobs_by_slurm_id(slurm_id: str) -> QuerySet[Attempt, Any]:
    """Select the ids of jobs by Slurm job id. The id of a het job's component (`123+0`) also matches `123`."""
    leader_id = slurm_id.partition("+")[0]
    return Attempt.objects.filter(slurm_job_id__in={slurm_id, leader_id}).values("job_id")


def _build_word_condition(word: str) -> Q:
    """Build the condition for one word of a search.

    It matches a part of the name, the description or the owner's name, the beginning of the job's id, or a Slurm
    job id.
    """
    condition = Q(name__icontains=word) | Q(description__icontains=word)
    # A subquery compares the names of users once; a join would compare the name for every job.
    people = get_user_model()._default_manager.filter(username__icontains=word)
    condition |= Q(owner__in=people.values("pk"))
    hex_digits = word.replace("-", "").lower()
    if 6 <= len(hex_digits) <= 32 and all(c in "0123456789abcdef" for c in hex_digits):
        low, high = hex_digits.ljust(32, "0"), hex_digits.ljust(32, "f")
        condition |= Q(pk__gte=uuid.UUID(low), pk__lte=uuid.UUID(high))
    if word[0].isdigit() and word.replace("+", "").isdigit() and len(word) <= 40:
        condition |= Q(pk__in=_select_jobs_by_slurm_id(word))
    return condition
