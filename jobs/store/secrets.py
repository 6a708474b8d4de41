"""Stores a job's secrets: values of secret task variables and logins of image registries.

Secrets are encrypted with a key derived from SECRET_KEY and deleted when the job ends. They are never part of the
spec, the plan, an event or a log.
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
    """The secrets cannot be decrypted, because SECRET_KEY has changed since they were stored."""

    message = _(
        "The job's secrets were stored with another SLUICE_SECRET_KEY. Submit the job again."
    )


def _build_cipher() -> Fernet:
    digest = hashlib.sha256(b"sluice job secrets\0" + settings.SECRET_KEY.encode()).digest()
    return Fernet(base64.urlsafe_b64encode(digest))


# Logins are stored beside the variables, under this prefix and the image's name. The prefix contains spaces, so
# such a key cannot be the name of a variable.
_LOGIN_PREFIX = "login for "
SECRETS_PER_INSERT = 100


def store_secrets(
    jobs: Iterable[tuple[Job, Mapping[str, str], Mapping[str, Mapping[str, str]]]],
) -> None:
    """Store the secrets of new jobs: the values of secret variables, and the registry logins by image name."""
    rows = []
    for job, values, image_logins in jobs:
        payload: dict[str, Any] = dict(values)
        payload |= {_LOGIN_PREFIX + image: dict(login) for image, login in image_logins.items()}
        if payload:
            data = _build_cipher().encrypt(json.dumps(payload).encode())
            rows.append(JobSecret(job=job, data=data))
    JobSecret.objects.bulk_create(rows, batch_size=SECRETS_PER_INSERT)


def load_secret_values(job: Job) -> dict[str, str]:
    """Load the values of the job's secret variables. Raises SecretsUnreadable."""
    return {
        name: str(value)
        for name, value in _load_payload(job).items()
        if not name.startswith(_LOGIN_PREFIX)
    }


def load_image_logins(job: Job) -> dict[str, dict[str, str]]:
    """Load the registry logins by image name. Raises SecretsUnreadable."""
    return {
        name.removeprefix(_LOGIN_PREFIX): login
        for name, login in _load_payload(job).items()
        if name.startswith(_LOGIN_PREFIX)
    }


def _load_payload(job: Job) -> dict[str, Any]:
    row = JobSecret.objects.filter(job=job).first()
    if row is None:
        return {}
    try:
        payload: dict[str, Any] = json.loads(_build_cipher().decrypt(bytes(row.data)))
    except InvalidToken as error:
        raise SecretsUnreadable(SecretsUnreadable.message) from error
    return payload


def delete_secrets(job_ids: Iterable[UUID]) -> None:
    JobSecret.objects.filter(job__in=list(job_ids)).delete()
