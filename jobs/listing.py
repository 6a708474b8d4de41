"""Lists of jobs as people ask for them: filtered, sorted, a page at a time, quick however many there are.

Pages go by key (the last row seen), never by offset or COUNT. Whose jobs are in a list is `jobs.access`'s
rule (`visible_to`), cut here into branches that each walk one index: the person's own jobs and each of
their namespaces. The API and the pages share this.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, TypeAlias

from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.db.models.fields.json import KeyTextTransform

from clusters.access import Role, roles_of
from jobs.models import Attempt, Job

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from gateway.models import User

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

COLUMNS = (
    "id",
    "name",
    "owner_id",
    "owner__username",
    "namespace_id",
    "namespace__name",
    "namespace__active",
    "cluster__name",
    "cluster__enabled",
    "cluster__status__last_ok_at",
    "state",
    "wanted",
    "reason_code",
    "reason_params",
    "reason_text",
    "exit_code",
    "description",
    "labels",
    "created_at",
    "submitted_at",
    "started_at",
    "ended_at",
    "expected_start",
    "time_limit_s",
    "wanted_time_limit_s",
    "attempt_number",
    "slurm_job_id",
    "cpus",
    "mem_mib",
    "gpus",
    "gpu_type",
    "node_count",
    "task_count",
    "is_distributed",
    "has_secrets",
    "cloned_from",
)
_OWNER_ID, _NAMESPACE_ID = COLUMNS.index("owner_id"), COLUMNS.index("namespace_id")


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
    def column(self) -> str:
        return SORTS[self.sort.removeprefix("-")]

    @property
    def descending(self) -> bool:
        return self.sort.startswith("-")


Key: TypeAlias = tuple[Any, uuid.UUID]


@dataclass(frozen=True, slots=True)
class Page:
    rows: list[tuple[Any, ...]]
    next_key: Key | None
    roles: Mapping[int, Role]


def page_of_jobs(
    user: Person, wanted: JobFilter, *, after: Key | None = None, limit: int = DEFAULT_LIMIT
) -> Page:
    """One page in two queries: the person's roles, and the rows."""
    roles = _roles(user)
    jobs = _matching(user, roles, wanted, after, limit + 1)
    rows = list(_ordered(with_columns(jobs), wanted)[: limit + 1])
    next_key = None
    if len(rows) > limit:
        rows.pop()
        next_key = (rows[-1][-1], rows[-1][0])
    return Page([row[:-1] for row in rows], next_key, roles)


def count_jobs(user: Person, wanted: JobFilter) -> int:
    roles = _roles(user)
    jobs = _filtered(Job.objects.not_deleted(), wanted)
    return jobs.filter(reduce(or_, _branches(user, roles, wanted), Q(pk__in=[]))).count()


def one_job(user: Person, job_id: uuid.UUID) -> tuple[tuple[Any, ...], Role | None] | None:
    """COLUMNS of one job and the person's role in its namespace; None if they may not see it."""
    found = one_job_with(user, job_id)
    return found and found[:2]


def one_job_with(
    user: Person, job_id: uuid.UUID, *more: str
) -> tuple[tuple[Any, ...], Role | None, tuple[Any, ...]] | None:
    """`one_job` and `more` columns, in the same query."""
    jobs = with_columns(Job.objects.not_deleted().filter(pk=job_id))
    found = next(iter(jobs.values_list(*COLUMNS, *more)), None)
    if found is None or not user.is_authenticated or not user.is_active:
        return None
    row, rest = found[: len(COLUMNS)], found[len(COLUMNS) :]
    role = Role.ADMIN if user.is_superuser else roles_of(user).get(row[_NAMESPACE_ID])
    return (row, role, rest) if role is not None or row[_OWNER_ID] == user.pk else None


def with_columns(jobs: QuerySet[Job]) -> QuerySet[Job]:
    current = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt_number"))
    return jobs.annotate(slurm_job_id=Subquery(current.values("slurm_job_id")[:1]))


def _roles(user: Person) -> Mapping[int, Role]:
    # A superuser's role is the same everywhere; no need to ask for every namespace.
    if user.is_authenticated and user.is_superuser:
        return {}
    return roles_of(user)


def _branches(user: Person, roles: Mapping[int, Role], wanted: JobFilter) -> list[Q]:
    """`jobs.access.visible_to` as alternatives, each with an index of its own."""
    if not user.is_authenticated or not user.is_active:
        return []
    if wanted.mine:
        return [Q(owner_id=user.pk)]
    if user.is_superuser:
        return [Q()]
    return [Q(owner_id=user.pk), *(Q(namespace_id=pk) for pk in roles)]


def _matching(
    user: Person, roles: Mapping[int, Role], wanted: JobFilter, after: Key | None, limit: int
) -> QuerySet[Job]:
    branches = _branches(user, roles, wanted)
    if not branches:
        return Job.objects.none()
    states = [Q(state=state) for state in wanted.states] or [Q()]
    jobs = _filtered(Job.objects.not_deleted(), wanted)
    if after is not None:
        jobs = jobs.filter(_beyond(wanted, after))
    if len(branches) * len(states) == 1:
        return jobs.filter(branches[0], states[0])
    if len(branches) * len(states) > MAX_BRANCHES:
        return jobs.filter(reduce(or_, branches), reduce(or_, states))
    # Each branch gives its own first rows by its own index; together they are few to sort.
    firsts = [
        Q(pk__in=_order(jobs.filter(branch, state), wanted).values("pk")[:limit])
        for branch in branches
        for state in states
    ]
    return Job.objects.filter(reduce(or_, firsts))


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
        jobs = jobs.alias(**{alias: KeyTextTransform(key, "labels")})
        jobs = jobs.filter(**({alias: value} if value is not None else {f"{alias}__isnull": False}))
    return jobs


def _by_slurm_id(slurm_id: str) -> QuerySet[Attempt, Any]:
    """Also a component's id (`123+0`) finds its job."""
    whole = slurm_id.partition("+")[0]
    return Attempt.objects.filter(slurm_job_id__in={slurm_id, whole}).values("job_id")


def _word(word: str) -> Q:
    """One word of a search: a part of the name, the description or the owner, or an id."""
    found = Q(name__icontains=word) | Q(description__icontains=word)
    found |= Q(owner__username__icontains=word)
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


def _ordered(jobs: QuerySet[Job], wanted: JobFilter) -> QuerySet[Job, tuple[Any, ...]]:
    return _order(jobs, wanted).values_list(*COLUMNS, F(wanted.column))


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


def as_mappings(rows: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """For those who like names better than positions."""
    for row in rows:
        yield dict(zip(COLUMNS, row, strict=True))
