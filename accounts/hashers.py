"""The password hasher: Django's, in a worker process. A hash takes a third of a second of a processor."""

from __future__ import annotations

from django.contrib.auth.hashers import PBKDF2PasswordHasher

from core.workers import hash_in_worker


class WorkerPBKDF2PasswordHasher(PBKDF2PasswordHasher):
    """Computes the hashes of PBKDF2PasswordHasher, whose stored hashes stay valid, with the low priority of a worker.

    Not in a thread with low priority: while it waits for a processor with the interpreter lock, no other thread runs.
    """

    def encode(self, password: str, salt: str, iterations: int | None = None) -> str:
        return hash_in_worker(_encode, password, salt, iterations or self.iterations)


def _encode(password: str, salt: str, iterations: int) -> str:
    return PBKDF2PasswordHasher().encode(password, salt, iterations)
