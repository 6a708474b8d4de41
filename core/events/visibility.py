"""Which jobs and events a person may see, as plain values: a check needs no query per event or row.

`jobs.store.access.visibility_of` computes the values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visibility:
    """A person sees what they own and what belongs to one of their namespaces; a superuser sees all."""

    sees_all: bool
    user_id: int | None
    namespace_ids: frozenset[int]

    def allows(self, *, owner_id: int, namespace_id: int) -> bool:
        return self.sees_all or owner_id == self.user_id or namespace_id in self.namespace_ids
