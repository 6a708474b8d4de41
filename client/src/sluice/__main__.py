"""`python -m sluice` is the command `sluice`."""

from __future__ import annotations

from sluice.command import main

main()
