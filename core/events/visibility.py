"""What a person may see, as plain values, so that no query is needed per event or row.

The values are computed by `jobs.store.access.visibility_of`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Visibility:
    sees_all: bool
    user_id: int | None
    namespace_ids: frozenset[int]

    def allows(self, *, owner_id: int, namespace_id: int) -> bool:
        return self.sees_all or owner_id == self.user_id or namespace_id in self.namespace_ids
