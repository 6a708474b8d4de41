"""Which jobs and events a person may see, as values that were loaded once: checking a row or an event needs no query.

`jobs.store.access.visibility_of` loads the values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visibility:
    """A person sees what they own and what belongs to one of `namespace_ids`; a superuser sees all."""

    sees_all: bool
    user_id: int | None
    namespace_ids: frozenset[int]

    def allows(self, *, owner_id: int, namespace_id: int) -> bool:
        return self.sees_all or owner_id == self.user_id or namespace_id in self.namespace_ids
