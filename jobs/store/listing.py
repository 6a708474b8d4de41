"""Lists of jobs as people ask for them: filtered, sorted, a page at a time, quick however many there are.

Pages go by key (the last row seen), never by offset or COUNT. Whose jobs are in a list is `jobs.store.access`'s
rule (`visible_to`), cut here into branches that each walk one index: the person's own jobs and each of
their namespaces. The API and the pages share this.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeAlias

from django.contrib.auth import get_user_model
from django.db.models import F, Q, QuerySet, TextField
from django.db.models.fields.json import KeyTextTransform
from django.db.models.functions import Cast

from clusters.access import Role, roles_of
from clusters.models import Namespace
from jobs.models import Attempt, Job
from jobs.store.rows import (
    NAMESPACE_ID,
    OWNER_ID,
    Row,
    datetime_param,
    execute,
    fetch_row,
    fetch_rows,
    id_param,
    parse_datetime,
    parse_id,
    placeholders,
    quoted_table,
)

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from accounts.models import User

    Person: TypeAlias = User | AnonymousUser

DEFAULT_LIMIT = 50
MAX_LIMIT = 200
# More branches than this cost more than they save.
MAX_BRANCHES = 24
# Sort word → column; "-" before the word turns it round.
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
    """What someone asks for. Empty means: everything they may see."""

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
    def is_simple(self) -> bool:
        """Nothing but comparisons of columns."""
        return not (self.q or self.ids or self.slurm_id or self.labels)

    @property
    def column(self) -> str:
        return SORT_COLUMNS[self.sort.removeprefix("-")]

    @property
    def descending(self) -> bool:
        return self.sort.startswith("-")


PageKey: TypeAlias = tuple[Any, uuid.UUID]


@dataclass(frozen=True, slots=True)
class Page:
    rows: list[Row]
    next_key: PageKey | None
    roles: Mapping[int, Role]


def list_jobs_page(
    user: Person, job_filter: JobFilter, *, after: PageKey | None = None, limit: int = DEFAULT_LIMIT
) -> Page:
    """One page in three queries: the person's roles, the keys of the page, their rows."""
    roles = _roles(user)
    branches = _branches(user, roles, job_filter)
    if job_filter.is_simple and len(branches) * max(1, len(job_filter.states)) <= MAX_BRANCHES:
        keys = _page_keys_by_index(branches, job_filter, after, limit + 1)
    else:
        keys = _page_keys_by_orm(branches, job_filter, after, limit + 1)
    next_key = None
    if len(keys) > limit:
        keys = keys[:limit]
        next_key = _parse_key(keys[-1], job_filter)
    return Page(fetch_rows([key[0] for key in keys]), next_key, roles)


def count_jobs(user: Person, job_filter: JobFilter) -> int:
    roles = _roles(user)
    jobs = _apply_filter(Job.objects.not_deleted(), job_filter)
    return jobs.filter(_match_any_branch(_branches(user, roles, job_filter))).count()


def one_job(user: Person, job_id: uuid.UUID) -> tuple[Row, Role | None] | None:
    """COLUMNS of one job and the person's role in its namespace; None if they may not see it."""
    found = find_job_row_with_details(user, job_id, with_details=False)
    return found and found[:2]


def find_job_row_with_details(
    user: Person, job_id: uuid.UUID, *, with_details: bool = True
) -> tuple[Row, Role | None, Row] | None:
    """`one_job`, and the columns MORE in the same query."""
    found = fetch_row(job_id, with_details=with_details)
    if found is None or not user.is_authenticated or not user.is_active:
        return None
    row, more = found
    role = Role.ADMIN if user.is_superuser else roles_of(user).get(row[NAMESPACE_ID])
    return (row, role, more) if role is not None or row[OWNER_ID] == user.pk else None


def _roles(user: Person) -> Mapping[int, Role]:
    # A superuser's role is the same everywhere; no need to ask for every namespace.
    if user.is_authenticated and user.is_superuser:
        return {}
    return roles_of(user)


Branch: TypeAlias = tuple[str, int] | None  # a column and its value; None: everything


def _branches(user: Person, roles: Mapping[int, Role], job_filter: JobFilter) -> list[Branch]:
    """`jobs.store.access.visible_to` as alternatives, each with an index of its own."""
    if not user.is_authenticated or not user.is_active:
        return []
    if job_filter.mine:
        return [("owner_id", user.pk)]
    if user.is_superuser:
        return [None]
    return [("owner_id", user.pk), *(("namespace_id", pk) for pk in roles)]


def _match_any_branch(branches: Sequence[Branch]) -> Q:
    if None in branches:
        return Q()
    return reduce(or_, (Q(**dict([branch])) for branch in branches if branch), Q(pk__in=[]))


# Keys by SQL of our own: each branch (and state) walks its index and stops; together they are few.


def _page_keys_by_index(
    branches: Sequence[Branch], job_filter: JobFilter, after: PageKey | None, limit: int
) -> list[tuple[Any, Any]]:
    if not branches:
        return []
    column, direction = job_filter.column, "DESC" if job_filter.descending else "ASC"
    null_order = " NULLS LAST" if column in _NULLABLE else ""
    order = f"ORDER BY {column} {direction}{null_order}, id {direction} LIMIT {limit}"
    conditions, params = _conditions(job_filter, after)
    selects, values = [], []
    for branch in branches:
        for state in job_filter.states or (None,):
            more, branch_params = list(conditions), list(params)
            if branch is not None:
                more.append(f"{branch[0]} = %s")
                branch_params.append(branch[1])
            if state is not None:
                more.append("state = %s")
                branch_params.append(state)
            where = " AND ".join(more)
            selects.append(f"SELECT id, {column} FROM {quoted_table(Job)} WHERE {where} {order}")
            values += branch_params
    if len(selects) == 1:
        return execute(selects[0], values, 2)
    # UNION drops the doubles: one's own job in one's own namespace.
    union = " UNION ".join(f"SELECT * FROM ({select}) b{n}" for n, select in enumerate(selects))
    return execute(f"SELECT id, {column} FROM ({union}) k {order}", values, 2)


def _conditions(job_filter: JobFilter, after: PageKey | None) -> tuple[list[str], list[Any]]:
    conditions, params = ["deleted_at IS NULL"], list[Any]()

    def add(sql: str, *values: Any) -> None:
        conditions.append(sql)
        params.extend(values)

    for column, names, model, field_name in (
        ("namespace_id", job_filter.namespaces, Namespace, "name"),
        ("owner_id", job_filter.owners, get_user_model(), "username"),
    ):
        if names:
            marks = placeholders(names)
            add(
                f"{column} IN (SELECT id FROM {quoted_table(model)} WHERE {field_name} IN ({marks}))",
                *names,
            )
    if job_filter.name:
        add("name = %s", job_filter.name)
    if job_filter.gpu_type:
        add("gpu_type = %s", job_filter.gpu_type)
    if job_filter.distributed is not None:
        add("is_distributed = %s", job_filter.distributed)
    for column, (since, until) in job_filter.ranges.items():
        if since is not None:
            add(f"{column} >= %s", datetime_param(since))
        if until is not None:
            add(f"{column} < %s", datetime_param(until))
    if after is not None:
        _add_after_key(add, job_filter, after)
    return conditions, params


def _add_after_key(add: Callable[..., None], job_filter: JobFilter, after: PageKey) -> None:
    """Only what comes after the key. The bound on the column alone lets an index begin there."""
    value, last = after[0], id_param(after[1])
    column, comparison = job_filter.column, "<" if job_filter.descending else ">"
    if value is None:
        add(f"{column} IS NULL AND id {comparison} %s", last)
        return
    value = datetime_param(value) if isinstance(value, datetime) else value
    after_key = f"{column} {comparison}= %s AND ({column} {comparison} %s OR id {comparison} %s)"
    if column in _NULLABLE:
        after_key = f"(({after_key}) OR {column} IS NULL)"
    add(after_key, value, value, last)


def _parse_key(key: tuple[Any, Any], job_filter: JobFilter) -> PageKey:
    last, value = key
    if job_filter.column.endswith("_at"):
        value = parse_datetime(value)
    return value, uuid.UUID(parse_id(last))


# Keys by the ORM, for what needs more than a comparison: searches, labels, Slurm's ids.


def _page_keys_by_orm(
    branches: Sequence[Branch], job_filter: JobFilter, after: PageKey | None, limit: int
) -> list[tuple[Any, Any]]:
    jobs = _apply_filter(Job.objects.not_deleted().filter(_match_any_branch(branches)), job_filter)
    if after is not None:
        jobs = jobs.filter(_after_key(job_filter, after))
    found = _order(jobs, job_filter).values_list("pk", job_filter.column)[:limit]
    return [(id_param(pk), value) for pk, value in found]


def _apply_filter(jobs: QuerySet[Job], job_filter: JobFilter) -> QuerySet[Job]:
    conditions = Q()
    for column, values in (
        ("state", job_filter.states),
        ("namespace__name", job_filter.namespaces),
        ("owner__username", job_filter.owners),
        ("pk", job_filter.ids),
    ):
        if values:
            conditions &= Q(**{f"{column}__in": values})
    if job_filter.name:
        conditions &= Q(name=job_filter.name)
    if job_filter.gpu_type:
        conditions &= Q(gpu_type=job_filter.gpu_type)
    if job_filter.distributed is not None:
        conditions &= Q(is_distributed=job_filter.distributed)
    if job_filter.slurm_id:
        conditions &= Q(pk__in=_by_slurm_id(job_filter.slurm_id))
    for column, (since, until) in job_filter.ranges.items():
        if since is not None:
            conditions &= Q(**{f"{column}__gte": since})
        if until is not None:
            conditions &= Q(**{f"{column}__lt": until})
    for word in job_filter.q.split():
        conditions &= _match_word(word)
    jobs = jobs.filter(conditions)
    for number, (key, value) in enumerate(job_filter.labels):
        alias = f"_label{number}"
        jobs = jobs.alias(**{alias: Cast(KeyTextTransform(key, "labels"), TextField())})
        jobs = jobs.filter(**({alias: value} if value is not None else {f"{alias}__isnull": False}))
    return jobs


def _by_slurm_id(slurm_id: str) -> QuerySet[Attempt, Any]:
    """Also a component's id (`123+0`) finds its job."""
    whole = slurm_id.partition("+")[0]
    return Attempt.objects.filter(slurm_job_id__in={slurm_id, whole}).values("job_id")


def _match_word(word: str) -> Q:
    """One word of a search: a part of the name, the description or the owner, or an id."""
    found = Q(name__icontains=word) | Q(description__icontains=word)
    # A subquery, asked once; a join would be asked for every row.
    people = get_user_model()._default_manager.filter(username__icontains=word)
    found |= Q(owner__in=people.values("pk"))
    compact = word.replace("-", "").lower()
    if 6 <= len(compact) <= 32 and all(c in "0123456789abcdef" for c in compact):
        low, high = compact.ljust(32, "0"), compact.ljust(32, "f")
        found |= Q(pk__gte=uuid.UUID(low), pk__lte=uuid.UUID(high))
    if word[0].isdigit() and word.replace("+", "").isdigit() and len(word) <= 40:
        found |= Q(pk__in=_by_slurm_id(word))
    return found


def _order(jobs: QuerySet[Job], job_filter: JobFilter) -> QuerySet[Job]:
    column, sign = job_filter.column, "-" if job_filter.descending else ""
    if column not in _NULLABLE:
        return jobs.order_by(f"{sign}{column}", f"{sign}id")
    # Jobs without the time come last, either way.
    ref = F(column)
    ordered = ref.desc(nulls_last=True) if job_filter.descending else ref.asc(nulls_last=True)
    return jobs.order_by(ordered, f"{sign}id")


def _after_key(job_filter: JobFilter, key: PageKey) -> Q:
    value, last_id = key
    column, descending = job_filter.column, job_filter.descending
    further = Q(**{"id__lt" if descending else "id__gt": last_id})
    if value is None:
        return Q(**{f"{column}__isnull": True}) & further
    same = Q(**{column: value}) & further
    comparison = Q(**{f"{column}__{'lt' if descending else 'gt'}": value})
    # The outer bound alone lets an index begin at the right place.
    bound = Q(**{f"{column}__{'lte' if descending else 'gte'}": value})
    after_key = bound & (comparison | same)
    return after_key | Q(**{f"{column}__isnull": True}) if column in _NULLABLE else after_key
