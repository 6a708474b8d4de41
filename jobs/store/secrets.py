"""A job's secrets at rest: encrypted with a key derived from SECRET_KEY, deleted when the job ends.

Values of task variables and logins of image registries. They are never in the spec, the plan, an event or a log.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from core.messages import _
from jobs.models import Job, JobSecret


class SecretsUnreadable(Exception):
    """SECRET_KEY differs from the one that encrypted them."""

    message = _(
        "The job's secrets were stored with another SLUICE_SECRET_KEY. Submit the job again."
    )


def _fernet() -> Fernet:
    digest = hashlib.sha256(b"sluice job secrets\0" + settings.SECRET_KEY.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(digest))


# Not a valid variable name, so it cannot collide.
_LOGIN_PREFIX = "login for "


def store(
    job: Job, values: Mapping[str, str], image_logins: Mapping[str, Mapping[str, str]] | None = None
) -> None:
    """Values of variables, and registry logins by image name."""
    payload: dict[str, Any] = dict(values)
    payload |= {_LOGIN_PREFIX + image: dict(login) for image, login in (image_logins or {}).items()}
    if payload:
        data = _fernet().encrypt(json.dumps(payload).encode())
        JobSecret.objects.update_or_create(job=job, defaults={"data": data})


def load(job: Job) -> dict[str, str]:
    """Values of variables."""
    found = _load(job).items()
    return {name: str(value) for name, value in found if not name.startswith(_LOGIN_PREFIX)}


def load_image_logins(job: Job) -> dict[str, dict[str, str]]:
    found = _load(job).items()
    return {
        name.removeprefix(_LOGIN_PREFIX): login
        for name, login in found
        if name.startswith(_LOGIN_PREFIX)
    }


def _load(job: Job) -> dict[str, Any]:
    row = JobSecret.objects.filter(job=job).first()
    if row is None:
        return {}
    try:
        values: dict[str, Any] = json.loads(_fernet().decrypt(bytes(row.data)))
    except InvalidToken as error:
        raise SecretsUnreadable(SecretsUnreadable.message) from error
    return values


def delete(job_ids: Iterable[UUID]) -> None:
    JobSecret.objects.filter(job__in=list(job_ids)).delete()
