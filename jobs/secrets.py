"""A job's secret values at rest: encrypted with a key made from SECRET_KEY, kept only while it lives.

They are never in the spec, the plan, an event or a log.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from uuid import UUID

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from clusters.sentences import _
from jobs.models import Job, JobSecret


class SecretsUnreadable(Exception):
    """SECRET_KEY is not the one with which they were written."""

    message = _(
        "The job's secrets were stored with another SLUICE_SECRET_KEY. Submit the job again."
    )


def _fernet() -> Fernet:
    digest = hashlib.sha256(b"sluice job secrets\0" + settings.SECRET_KEY.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(digest))


def store(job: Job, values: Mapping[str, str]) -> None:
    if values:
        data = _fernet().encrypt(json.dumps(dict(values)).encode())
        JobSecret.objects.update_or_create(job=job, defaults={"data": data})


def load(job: Job) -> dict[str, str]:
    row = JobSecret.objects.filter(job=job).first()
    if row is None:
        return {}
    try:
        values = json.loads(_fernet().decrypt(bytes(row.data)))
    except InvalidToken as error:
        raise SecretsUnreadable(SecretsUnreadable.message) from error
    return {str(name): str(value) for name, value in values.items()}


def forget(job_ids: Iterable[UUID]) -> None:
    JobSecret.objects.filter(job__in=list(job_ids)).delete()
