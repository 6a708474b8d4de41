"""Rows as the JSON that the API answers: plain functions, quick enough for lists.

The shapes are described for the schema in `jobs.api.answers`; tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson
from django.utils.translation import get_language

from clusters.access import Role
from jobs.lifecycle.reasons import sentence_for, told_params
from jobs.lifecycle.states import END_STATES, JobState, Wanted
from jobs.models import Attempt, Task
from jobs.store.access import Verb, allowed_verbs
from jobs.store.rows import COLUMNS, NAMESPACE_ID, OWNER_ID, Row, read_id, read_json, read_moment
from jobs.store.rows import iso as iso

if TYPE_CHECKING:
    from accounts.models import User

NAMESPACE_ACTIVE, CLUSTER_ENABLED, STARTED_AT, ENDED_AT = map(
    COLUMNS.index, ("namespace_active", "cluster_enabled", "started_at", "ended_at")
)
ENDED = frozenset(state.value for state in END_STATES)
API = "/api/v1"


@lru_cache(maxsize=4096)
def _sentence(language: str | None, code: str, params: str, text: str) -> str:
    return sentence_for(code, json.loads(params), text)


def reason(code: str, params: Mapping[str, Any] | str, text: str) -> dict[str, Any]:
    """In the language of the request. `params` as a mapping or as JSON."""
    if not code:
        return {"code": "", "text": "", "params": {}, "slurm_text": text}
    source = params if isinstance(params, str) else json.dumps(params, sort_keys=True)
    words = _sentence(get_language(), code, source, text)
    return {
        "code": code,
        "text": words,
        "params": told_params(json.loads(source)),
        "slurm_text": text,
    }


def possible(verbs: frozenset[Verb], state: str, wanted: str, has_secrets: bool) -> dict[str, bool]:
    """What the person may do and what makes sense now."""
    ended = state in ENDED
    return {
        "edit": Verb.EDIT in verbs,
        "stop": not ended and wanted == Wanted.RUN and Verb.STOP in verbs,
        "delete": ended and Verb.DELETE in verbs,
        "stop_and_delete": Verb.DELETE in verbs,
        "time_limit": not ended and Verb.TIME_LIMIT in verbs,
        "retry": ended and not has_secrets and Verb.RETRY in verbs,
        "clone": not has_secrets and Verb.CLONE in verbs,
    }


def job(row: Row, user: User, role: Role | None, now: datetime) -> dict[str, Any]:
    return _job(row, _verbs(row, user, role), now)


def jobs_json(
    rows: Iterable[Row], user: User, roles: Mapping[int, Role], now: datetime
) -> list[orjson.Fragment]:
    """Each `job` as JSON, for lists: the same rows are asked for again and again."""
    language, second = get_language(), now.replace(microsecond=0)
    made = []
    for row in rows:
        verbs = _verbs(row, user, roles.get(row[NAMESPACE_ID]))
        # Only a job that runs grows older.
        is_over = row[STARTED_AT] is None or row[ENDED_AT] is not None
        made.append(orjson.Fragment(_job_json(row, verbs, None if is_over else second, language)))
    return made


@lru_cache(maxsize=4096)
def _job_json(
    row: Row, verbs: frozenset[Verb], now: datetime | None, language: str | None
) -> bytes:
    """Everything that the answer depends on is in the key; `language` through `reason`.

    Copied, because it is kept: what `orjson.dumps` returns holds on to a buffer of at least 16 KB.
    """
    return bytes(memoryview(orjson.dumps(_job(row, verbs, now))))


def _verbs(row: Row, user: User, role: Role | None) -> frozenset[Verb]:
    takes_jobs = bool(row[NAMESPACE_ACTIVE] and row[CLUSTER_ENABLED])
    return allowed_verbs(user, role, owner_id=row[OWNER_ID], takes_jobs=takes_jobs)


def _duration_s(row: Row, now: datetime | None) -> int | None:
    if (began := read_moment(row[STARTED_AT])) is None:
        return None
    until = read_moment(row[ENDED_AT]) or now
    return max(0, int((until - began).total_seconds())) if until else None


def _job(row: Row, verbs: frozenset[Verb], now: datetime | None) -> dict[str, Any]:
    """`now` matters only to a job that runs."""
    (
        job_id,
        name,
        _owner_id,
        owner,
        _namespace_id,
        namespace,
        _namespace_active,
        cluster,
        _cluster_enabled,
        seen_at,
        state,
        wanted,
        reason_code,
        reason_params,
        reason_text,
        exit_code,
        description,
        labels,
        created_at,
        submitted_at,
        started_at,
        ended_at,
        expected_start,
        time_limit_s,
        wanted_time_limit_s,
        attempt,
        slurm_job_id,
        cpus,
        mem_mib,
        gpus,
        gpu_type,
        nodes,
        tasks,
        is_distributed,
        has_secrets,
        cloned_from,
    ) = row
    duration_s = _duration_s(row, now)
    time_left_s = None
    if state == JobState.RUNNING and time_limit_s is not None:
        time_left_s = max(0, time_limit_s - (duration_s or 0))
    text = read_id(job_id)
    return {
        "id": text,
        "name": name,
        "owner": owner,
        "namespace": namespace,
        "cluster": cluster,
        "state": state,
        "stopping": state not in ENDED and wanted != Wanted.RUN,
        "reason": reason(reason_code, reason_params, reason_text),
        "exit_code": exit_code,
        "description": description,
        "labels": read_json(labels),
        "created_at": iso(created_at),
        "submitted_at": iso(submitted_at),
        "started_at": iso(started_at),
        "ended_at": iso(ended_at),
        "expected_start": iso(expected_start),
        "duration_s": duration_s,
        "time_limit_s": time_limit_s,
        "wanted_time_limit_s": wanted_time_limit_s,
        "time_left_s": time_left_s,
        "cpus": cpus,
        "mem_mib": mem_mib,
        "gpus": gpus,
        "gpu_type": gpu_type,
        "nodes": nodes,
        "tasks": tasks,
        "is_distributed": bool(is_distributed),
        "attempt": attempt,
        "slurm_job_id": slurm_job_id or "",
        "cloned_from": read_id(cloned_from) if cloned_from else None,
        # An ended job is what it is; a live one is as old as the cluster's last answer.
        "seen_at": iso(ended_at if state in ENDED else seen_at),
        "can": possible(verbs, state, wanted, has_secrets),
        "links": {"self": f"{API}/jobs/{text}", "page": f"/jobs/{text}"},
    }


assert len(COLUMNS) == 36  # noqa: S101 - `job` unpacks them by position


def attempt(row: Attempt) -> dict[str, Any]:
    return {
        "number": row.number,
        "phase": row.phase,
        "slurm_job_id": row.slurm_job_id,
        "components": row.component_ids,
        "slurm_state": row.slurm_state,
        "nodes": row.nodes,
        "unix_user": row.unix_user,
        "work_dir": row.work_dir,
        "reason": reason(row.reason_code, row.reason_params, row.reason_text),
        "exit_code": row.exit_code,
        "signal": row.signal,
        "created_at": iso(row.created_at),
        "submitted_at": iso(row.submitted_at),
        "started_at": iso(row.started_at),
        "ended_at": iso(row.ended_at),
    }


def task(row: Task, attempt_number: int) -> dict[str, Any]:
    return {
        "attempt": attempt_number,
        "role": row.role,
        "index": row.index,
        "state": row.state,
        "node": row.node,
        "ip": row.ip,
        "ports": row.ports,
        "gpus": row.gpus,
        "exit_code": row.exit_code,
        "started_at": iso(row.started_at),
        "ended_at": iso(row.ended_at),
    }
