"""The password hasher: Django's, in a thread with low priority. A hash takes a third of a second of a processor."""

from __future__ import annotations

from django.contrib.auth.hashers import PBKDF2PasswordHasher

from core.workers import run_with_low_priority


class LowPriorityPBKDF2PasswordHasher(PBKDF2PasswordHasher):
    """Computes the hashes of PBKDF2PasswordHasher, whose stored hashes stay valid.

    Python's hash function lets other threads run, so that sign-ins compete with requests only for processors.
    """

    def encode(self, password: str, salt: str, iterations: int | None = None) -> str:
        return run_with_low_priority(super().encode, password, salt, iterations)
