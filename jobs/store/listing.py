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
    execute,
    id_param,
    moment_param,
    placeholders,
    read_id,
    read_moment,
    row_of,
    rows_of,
    table,
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
SORTS: Mapping[str, str] = {
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
        return SORTS[self.sort.removeprefix("-")]

    @property
    def descending(self) -> bool:
        return self.sort.startswith("-")


Key: TypeAlias = tuple[Any, uuid.UUID]


@dataclass(frozen=True, slots=True)
class Page:
    rows: list[Row]
    next_key: Key | None
    roles: Mapping[int, Role]


def page_of_jobs(
    user: Person, wanted: JobFilter, *, after: Key | None = None, limit: int = DEFAULT_LIMIT
) -> Page:
    """One page in three queries: the person's roles, the keys of the page, their rows."""
    roles = _roles(user)
    branches = _branches(user, roles, wanted)
    if wanted.is_simple and len(branches) * max(1, len(wanted.states)) <= MAX_BRANCHES:
        keys = _keys_by_index(branches, wanted, after, limit + 1)
    else:
        keys = _keys_by_orm(branches, wanted, after, limit + 1)
    next_key = None
    if len(keys) > limit:
        keys = keys[:limit]
        next_key = _typed_key(keys[-1], wanted)
    return Page(rows_of([key[0] for key in keys]), next_key, roles)


def count_jobs(user: Person, wanted: JobFilter) -> int:
    roles = _roles(user)
    jobs = _filtered(Job.objects.not_deleted(), wanted)
    return jobs.filter(_any_of(_branches(user, roles, wanted))).count()


def one_job(user: Person, job_id: uuid.UUID) -> tuple[Row, Role | None] | None:
    """COLUMNS of one job and the person's role in its namespace; None if they may not see it."""
    found = one_job_with_more(user, job_id, with_more=False)
    return found and found[:2]


def one_job_with_more(
    user: Person, job_id: uuid.UUID, *, with_more: bool = True
) -> tuple[Row, Role | None, Row] | None:
    """`one_job`, and the columns MORE in the same query."""
    found = row_of(job_id, with_more=with_more)
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


def _branches(user: Person, roles: Mapping[int, Role], wanted: JobFilter) -> list[Branch]:
    """`jobs.store.access.visible_to` as alternatives, each with an index of its own."""
    if not user.is_authenticated or not user.is_active:
        return []
    if wanted.mine:
        return [("owner_id", user.pk)]
    if user.is_superuser:
        return [None]
    return [("owner_id", user.pk), *(("namespace_id", pk) for pk in roles)]


def _any_of(branches: Sequence[Branch]) -> Q:
    if None in branches:
        return Q()
    return reduce(or_, (Q(**dict([branch])) for branch in branches if branch), Q(pk__in=[]))


# Keys by SQL of our own: each branch (and state) walks its index and stops; together they are few.


def _keys_by_index(
    branches: Sequence[Branch], wanted: JobFilter, after: Key | None, limit: int
) -> list[tuple[Any, Any]]:
    if not branches:
        return []
    column, turn = wanted.column, "DESC" if wanted.descending else "ASC"
    null_order = " NULLS LAST" if column in _NULLABLE else ""
    order = f"ORDER BY {column} {turn}{null_order}, id {turn} LIMIT {limit}"
    conditions, params = _conditions(wanted, after)
    selects, values = [], []
    for branch in branches:
        for state in wanted.states or (None,):
            more, own = list(conditions), list(params)
            if branch is not None:
                more.append(f"{branch[0]} = %s")
                own.append(branch[1])
            if state is not None:
                more.append("state = %s")
                own.append(state)
            where = " AND ".join(more)
            selects.append(f"SELECT id, {column} FROM {table(Job)} WHERE {where} {order}")
            values += own
    if len(selects) == 1:
        return execute(selects[0], values, 2)
    # UNION drops the doubles: one's own job in one's own namespace.
    union = " UNION ".join(f"SELECT * FROM ({select}) b{n}" for n, select in enumerate(selects))
    return execute(f"SELECT id, {column} FROM ({union}) k {order}", values, 2)


def _conditions(wanted: JobFilter, after: Key | None) -> tuple[list[str], list[Any]]:
    conditions, params = ["deleted_at IS NULL"], list[Any]()

    def add(sql: str, *values: Any) -> None:
        conditions.append(sql)
        params.extend(values)

    for column, names, other, field_name in (
        ("namespace_id", wanted.namespaces, Namespace, "name"),
        ("owner_id", wanted.owners, get_user_model(), "username"),
    ):
        if names:
            places = placeholders(names)
            add(
                f"{column} IN (SELECT id FROM {table(other)} WHERE {field_name} IN ({places}))",
                *names,
            )
    if wanted.name:
        add("name = %s", wanted.name)
    if wanted.gpu_type:
        add("gpu_type = %s", wanted.gpu_type)
    if wanted.distributed is not None:
        add("is_distributed = %s", wanted.distributed)
    for column, (since, until) in wanted.ranges.items():
        if since is not None:
            add(f"{column} >= %s", moment_param(since))
        if until is not None:
            add(f"{column} < %s", moment_param(until))
    if after is not None:
        _add_beyond(add, wanted, after)
    return conditions, params


def _add_beyond(add: Callable[..., None], wanted: JobFilter, after: Key) -> None:
    """Only what comes after the key. The bound on the column alone lets an index begin there."""
    value, last = after[0], id_param(after[1])
    column, past = wanted.column, "<" if wanted.descending else ">"
    if value is None:
        add(f"{column} IS NULL AND id {past} %s", last)
        return
    value = moment_param(value) if isinstance(value, datetime) else value
    beyond = f"{column} {past}= %s AND ({column} {past} %s OR id {past} %s)"
    if column in _NULLABLE:
        beyond = f"(({beyond}) OR {column} IS NULL)"
    add(beyond, value, value, last)


def _typed_key(key: tuple[Any, Any], wanted: JobFilter) -> Key:
    last, value = key
    if wanted.column.endswith("_at"):
        value = read_moment(value)
    return value, uuid.UUID(read_id(last))


# Keys by the ORM, for what needs more than a comparison: searches, labels, Slurm's ids.


def _keys_by_orm(
    branches: Sequence[Branch], wanted: JobFilter, after: Key | None, limit: int
) -> list[tuple[Any, Any]]:
    jobs = _filtered(Job.objects.not_deleted().filter(_any_of(branches)), wanted)
    if after is not None:
        jobs = jobs.filter(_beyond(wanted, after))
    found = _order(jobs, wanted).values_list("pk", wanted.column)[:limit]
    return [(id_param(pk), value) for pk, value in found]


def _filtered(jobs: QuerySet[Job], wanted: JobFilter) -> QuerySet[Job]:
    conditions = Q()
    for column, values in (
        ("state", wanted.states),
        ("namespace__name", wanted.namespaces),
        ("owner__username", wanted.owners),
        ("pk", wanted.ids),
    ):
        if values:
            conditions &= Q(**{f"{column}__in": values})
    if wanted.name:
        conditions &= Q(name=wanted.name)
    if wanted.gpu_type:
        conditions &= Q(gpu_type=wanted.gpu_type)
    if wanted.distributed is not None:
        conditions &= Q(is_distributed=wanted.distributed)
    if wanted.slurm_id:
        conditions &= Q(pk__in=_by_slurm_id(wanted.slurm_id))
    for column, (since, until) in wanted.ranges.items():
        if since is not None:
            conditions &= Q(**{f"{column}__gte": since})
        if until is not None:
            conditions &= Q(**{f"{column}__lt": until})
    for word in wanted.q.split():
        conditions &= _word(word)
    jobs = jobs.filter(conditions)
    for number, (key, value) in enumerate(wanted.labels):
        alias = f"_label{number}"
        jobs = jobs.alias(**{alias: Cast(KeyTextTransform(key, "labels"), TextField())})
        jobs = jobs.filter(**({alias: value} if value is not None else {f"{alias}__isnull": False}))
    return jobs


def _by_slurm_id(slurm_id: str) -> QuerySet[Attempt, Any]:
    """Also a component's id (`123+0`) finds its job."""
    whole = slurm_id.partition("+")[0]
    return Attempt.objects.filter(slurm_job_id__in={slurm_id, whole}).values("job_id")


def _word(word: str) -> Q:
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


def _order(jobs: QuerySet[Job], wanted: JobFilter) -> QuerySet[Job]:
    column, sign = wanted.column, "-" if wanted.descending else ""
    if column not in _NULLABLE:
        return jobs.order_by(f"{sign}{column}", f"{sign}id")
    # Jobs without the time come last, either way.
    ref = F(column)
    ordered = ref.desc(nulls_last=True) if wanted.descending else ref.asc(nulls_last=True)
    return jobs.order_by(ordered, f"{sign}id")


def _beyond(wanted: JobFilter, key: Key) -> Q:
    value, last_id = key
    column, descending = wanted.column, wanted.descending
    further = Q(**{"id__lt" if descending else "id__gt": last_id})
    if value is None:
        return Q(**{f"{column}__isnull": True}) & further
    same = Q(**{column: value}) & further
    past = Q(**{f"{column}__{'lt' if descending else 'gt'}": value})
    # The outer bound alone lets an index begin at the right place.
    bound = Q(**{f"{column}__{'lte' if descending else 'gte'}": value})
    beyond = bound & (past | same)
    return beyond | Q(**{f"{column}__isnull": True}) if column in _NULLABLE else beyond
