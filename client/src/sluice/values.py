"""Typed values made from the server's responses.

Every value keeps the whole response in `raw`. Fields of a newer server that this client does not know are no error;
`raw` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sluice.display import job_html
from sluice.errors import add_suggestion

END_STATES = frozenset(("COMPLETED", "FAILED", "STOPPED"))

Json = Mapping[str, Any]


def parse_timestamp(value: Any) -> datetime | None:
    return datetime.fromisoformat(value) if isinstance(value, str) and value else None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job is in its state."""

    code: str = ""
    text: str = ""
    slurm_text: str = ""

    @classmethod
    def from_json(cls, raw: Json) -> Reason:
        return cls(
            str(raw.get("code", "")), str(raw.get("text", "")), str(raw.get("slurm_text", ""))
        )

    def __str__(self) -> str:
        return self.text or self.slurm_text


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it was at the time of the request."""

    id: str
    name: str
    owner: str
    namespace: str
    state: str
    reason: Reason
    stopping: bool
    exit_code: int | None
    attempt: int
    slurm_job_id: str
    created_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    expected_start: datetime | None
    expected_end: datetime | None  # of a running job
    duration_s: int | None
    time_limit_s: int | None
    estimated_duration_s: int | None
    gpu_hours: float | None  # of the current attempt
    machine_hours: float | None  # cost of the current attempt; None: no price
    cpus: int
    mem_mib: int
    gpus: int
    gpu_type: str
    tasks: int
    kept_tasks: int  # failed tasks that isDebug keeps for inspection
    kept_until: datetime | None  # when the time limit ends them
    warnings: tuple[str, ...]
    plan_words: str
    raw: Json = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, raw: Json) -> Job:
        return cls(
            id=str(raw["id"]),
            name=str(raw.get("name", "")),
            owner=str(raw.get("owner", "")),
            namespace=str(raw.get("namespace", "")),
            state=str(raw.get("state", "")),
            reason=Reason.from_json(raw.get("reason") or {}),
            stopping=bool(raw.get("stopping", False)),
            exit_code=raw.get("exit_code"),
            attempt=int(raw.get("attempt") or 0),
            slurm_job_id=str(raw.get("slurm_job_id") or ""),
            created_at=parse_timestamp(raw.get("created_at")),
            started_at=parse_timestamp(raw.get("started_at")),
            ended_at=parse_timestamp(raw.get("ended_at")),
            expected_start=parse_timestamp(raw.get("expected_start")),
            expected_end=parse_timestamp(raw.get("expected_end")),
            duration_s=raw.get("duration_s"),
            time_limit_s=raw.get("time_limit_s"),
            estimated_duration_s=raw.get("estimated_duration_s"),
            gpu_hours=raw.get("gpu_hours"),
            machine_hours=raw.get("machine_hours"),
            cpus=int(raw.get("cpus") or 0),
            mem_mib=int(raw.get("mem_mib") or 0),
            gpus=int(raw.get("gpus") or 0),
            gpu_type=str(raw.get("gpu_type") or ""),
            tasks=int(raw.get("tasks") or 0),
            kept_tasks=int(raw.get("kept_tasks") or 0),
            kept_until=parse_timestamp(raw.get("kept_until")),
            warnings=tuple(warning_text(row) for row in raw.get("warnings") or ()),
            plan_words=str(raw.get("plan_words") or ""),
            raw=raw,
        )

    @property
    def ended(self) -> bool:
        return self.state in END_STATES

    @property
    def completed(self) -> bool:
        return self.state == "COMPLETED"

    def _repr_html_(self) -> str:
        return job_html(self.raw)


def warning_text(row: Any) -> str:
    if not isinstance(row, Mapping):
        return str(row)
    path = row.get("path")
    return f"{path}: {row.get('message', '')}" if path else str(row.get("message", ""))


def problem_text(row: Any) -> str:
    """Return a problem of a plan, followed by its suggestion."""
    suggestion = row.get("suggestion") if isinstance(row, Mapping) else ""
    return add_suggestion(warning_text(row), str(suggestion or ""))


@dataclass(frozen=True, slots=True)
class Task:
    role: str
    role_title: str  # name for people; empty: the role has none
    index: int
    state: str
    node: str
    exit_code: int | None
    reason: str  # why it failed
    kept_until: datetime | None  # state `kept`: when the time limit ends it
    age_s: int | None  # seconds since the state was read; None: it is final
    started_at: datetime | None
    ended_at: datetime | None
    raw: Json = field(repr=False, compare=False)
    pulled_bytes: int | None = None  # state "pulling": bytes of the image fetched so far

    @classmethod
    def from_json(cls, raw: Json, age_s: int | None = None) -> Task:
        return cls(
            role=str(raw["role"]),
            role_title=str(raw.get("role_title") or ""),
            index=int(raw["index"]),
            state=str(raw.get("state", "")),
            node=str(raw.get("node") or ""),
            exit_code=raw.get("exit_code"),
            reason=str(raw.get("reason") or ""),
            kept_until=parse_timestamp(raw.get("kept_until")),
            age_s=age_s,
            started_at=parse_timestamp(raw.get("started_at")),
            ended_at=parse_timestamp(raw.get("ended_at")),
            raw=raw,
            pulled_bytes=raw.get("pulled_bytes"),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a job file that is not submitted."""

    ok: bool
    may_submit: bool
    dialect: str
    namespace: str
    spec: Json
    words: str
    script: str
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    starts_now: bool | None
    expected_start: datetime | None  # estimate for a job that would wait
    # At most, if the job uses its whole time limit. `machine_hours` is its cost; None: no price or no time limit.
    machine_hours: float | None
    gpu_hours: float | None
    node_hours: float | None
    raw: Json = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, raw: Json) -> Plan:
        return cls(
            ok=bool(raw.get("ok")),
            may_submit=bool(raw.get("may_submit")),
            dialect=str(raw.get("dialect", "")),
            namespace=str(raw.get("namespace", "")),
            spec=raw.get("spec") or {},
            words=str(raw.get("plan_words") or ""),
            script=str(raw.get("script") or ""),
            warnings=tuple(warning_text(row) for row in raw.get("warnings") or ()),
            problems=tuple(problem_text(row) for row in raw.get("problems") or ()),
            starts_now=raw.get("starts_now"),
            expected_start=parse_timestamp(raw.get("expected_start")),
            machine_hours=raw.get("machine_hours"),
            gpu_hours=raw.get("gpu_hours"),
            node_hours=raw.get("node_hours"),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class File:
    """One entry of a directory on the cluster."""

    name: str
    path: str
    kind: str  # file, dir, link or other
    size: int
    modified_at: datetime | None
    raw: Json = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, raw: Json) -> File:
        return cls(
            name=str(raw["name"]),
            path=str(raw["path"]),
            kind=str(raw.get("kind", "file")),
            size=int(raw.get("size") or 0),
            modified_at=parse_timestamp(raw.get("modified_at")),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Template:
    id: str
    name: str
    description: str
    owner: str
    visibility: str
    namespace: str | None
    version: int
    parameters: tuple[Json, ...]
    spec: Json  # only in the response for one template
    raw: Json = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, raw: Json) -> Template:
        return cls(
            id=str(raw["id"]),
            name=str(raw.get("name", "")),
            description=str(raw.get("description", "")),
            owner=str(raw.get("owner", "")),
            visibility=str(raw.get("visibility", "")),
            namespace=raw.get("namespace"),
            version=int(raw.get("version") or 1),
            parameters=tuple(raw.get("parameters") or ()),
            spec=raw.get("spec") or {},
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    name: str
    prefix: str
    scope: str
    expires_at: datetime | None
    last_used_at: datetime | None
    is_current: bool
    secret: str = field(repr=False)  # only in the response that created it
    raw: Json = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, raw: Json) -> Token:
        return cls(
            id=int(raw["id"]),
            name=str(raw.get("name", "")),
            prefix=str(raw.get("prefix", "")),
            scope=str(raw.get("scope", "")),
            expires_at=parse_timestamp(raw.get("expires_at")),
            last_used_at=parse_timestamp(raw.get("last_used_at")),
            is_current=bool(raw.get("is_current")),
            secret=str(raw.get("token", "")),
            raw=raw,
        )
