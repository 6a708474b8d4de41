"""Number of generated cases per test; fewer in `scripts/test --fast`."""

from __future__ import annotations

import os


def scale_examples(full: int) -> int:
    return max(5, full // 20) if os.environ.get("SLUICE_TEST_FAST") else full
