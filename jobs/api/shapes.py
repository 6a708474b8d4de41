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
from jobs.lifecycle.reasons import render_reason_code, translate_params
from jobs.lifecycle.states import END_STATES, DesiredState, JobState
from jobs.models import Attempt, Task
from jobs.store.access import JobAction, allowed_actions
from jobs.store.rows import (
    COLUMNS,
    NAMESPACE_ID,
    OWNER_ID,
    Row,
    parse_datetime,
    parse_id,
    parse_json,
)
from jobs.store.rows import format_iso as format_iso

if TYPE_CHECKING:
    from accounts.models import User

NAMESPACE_ACTIVE, CLUSTER_ENABLED, STARTED_AT, ENDED_AT = map(
    COLUMNS.index, ("namespace_active", "cluster_enabled", "started_at", "ended_at")
)
END_STATE_VALUES = frozenset(state.value for state in END_STATES)
API_PREFIX = "/api/v1"


@lru_cache(maxsize=4096)
def _cached_reason_text(language: str | None, code: str, params: str, text: str) -> str:
    return render_reason_code(code, json.loads(params), text)


def serialize_reason(code: str, params: Mapping[str, Any] | str, text: str) -> dict[str, Any]:
    """In the language of the request. `params` as a mapping or as JSON."""
    if not code:
        return {"code": "", "text": "", "params": {}, "slurm_text": text}
    source = params if isinstance(params, str) else json.dumps(params, sort_keys=True)
    message = _cached_reason_text(get_language(), code, source, text)
    return {
        "code": code,
        "text": message,
        "params": translate_params(json.loads(source)),
        "slurm_text": text,
    }


def available_actions(
    verbs: frozenset[JobAction], state: str, wanted: str, has_secrets: bool
) -> dict[str, bool]:
    """What the person may do and what makes sense now."""
    ended = state in END_STATE_VALUES
    return {
        "edit": JobAction.EDIT in verbs,
        "stop": not ended and wanted == DesiredState.RUN and JobAction.STOP in verbs,
        "delete": ended and JobAction.DELETE in verbs,
        "stop_and_delete": JobAction.DELETE in verbs,
        "time_limit": not ended and JobAction.TIME_LIMIT in verbs,
        "retry": ended and not has_secrets and JobAction.RETRY in verbs,
        "clone": not has_secrets and JobAction.CLONE in verbs,
    }


def serialize_job(row: Row, user: User, role: Role | None, now: datetime) -> dict[str, Any]:
    return _serialize_job(row, _allowed_verbs_for(row, user, role), now)


def serialize_jobs_json(
    rows: Iterable[Row], user: User, roles: Mapping[int, Role], now: datetime
) -> list[orjson.Fragment]:
    """Each `job` as JSON, for lists: the same rows are asked for again and again."""
    language, second = get_language(), now.replace(microsecond=0)
    fragments = []
    for row in rows:
        verbs = _allowed_verbs_for(row, user, roles.get(row[NAMESPACE_ID]))
        # Only a job that runs grows older.
        is_static = row[STARTED_AT] is None or row[ENDED_AT] is not None
        fragments.append(
            orjson.Fragment(
                _serialize_job_json(row, verbs, None if is_static else second, language)
            )
        )
    return fragments


@lru_cache(maxsize=4096)
def _serialize_job_json(
    row: Row, verbs: frozenset[JobAction], now: datetime | None, language: str | None
) -> bytes:
    """Everything that the answer depends on is in the key; `language` through `reason`.

    Copied, because it is kept: what `orjson.dumps` returns holds on to a buffer of at least 16 KB.
    """
    return bytes(memoryview(orjson.dumps(_serialize_job(row, verbs, now))))


def _allowed_verbs_for(row: Row, user: User, role: Role | None) -> frozenset[JobAction]:
    accepts_jobs = bool(row[NAMESPACE_ACTIVE] and row[CLUSTER_ENABLED])
    return allowed_actions(user, role, owner_id=row[OWNER_ID], accepts_jobs=accepts_jobs)


def _duration_s(row: Row, now: datetime | None) -> int | None:
    if (started := parse_datetime(row[STARTED_AT])) is None:
        return None
    until = parse_datetime(row[ENDED_AT]) or now
    return max(0, int((until - started).total_seconds())) if until else None


def _serialize_job(row: Row, verbs: frozenset[JobAction], now: datetime | None) -> dict[str, Any]:
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
    text = parse_id(job_id)
    return {
        "id": text,
        "name": name,
        "owner": owner,
        "namespace": namespace,
        "cluster": cluster,
        "state": state,
        "stopping": state not in END_STATE_VALUES and wanted != DesiredState.RUN,
        "reason": serialize_reason(reason_code, reason_params, reason_text),
        "exit_code": exit_code,
        "description": description,
        "labels": parse_json(labels),
        "created_at": format_iso(created_at),
        "submitted_at": format_iso(submitted_at),
        "started_at": format_iso(started_at),
        "ended_at": format_iso(ended_at),
        "expected_start": format_iso(expected_start),
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
        "cloned_from": parse_id(cloned_from) if cloned_from else None,
        # An ended job is what it is; a live one is as old as the cluster's last answer.
        "seen_at": format_iso(ended_at if state in END_STATE_VALUES else seen_at),
        "can": available_actions(verbs, state, wanted, has_secrets),
        "links": {"self": f"{API_PREFIX}/jobs/{text}", "page": f"/jobs/{text}"},
    }


assert len(COLUMNS) == 36  # noqa: S101 - `job` unpacks them by position


def serialize_attempt(row: Attempt) -> dict[str, Any]:
    return {
        "number": row.number,
        "phase": row.phase,
        "slurm_job_id": row.slurm_job_id,
        "components": row.component_ids,
        "slurm_state": row.slurm_state,
        "nodes": row.nodes,
        "unix_user": row.unix_user,
        "work_dir": row.work_dir,
        "reason": serialize_reason(row.reason_code, row.reason_params, row.reason_text),
        "exit_code": row.exit_code,
        "signal": row.signal,
        "created_at": format_iso(row.created_at),
        "submitted_at": format_iso(row.submitted_at),
        "started_at": format_iso(row.started_at),
        "ended_at": format_iso(row.ended_at),
    }


def serialize_task(row: Task, attempt_number: int) -> dict[str, Any]:
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
        "started_at": format_iso(row.started_at),
        "ended_at": format_iso(row.ended_at),
    }
