#!/usr/bin/env python
"""Django's command line for Sluice."""

from __future__ import annotations

import sys

from gateway.command_line import run

if __name__ == "__main__":
    sys.exit(run(sys.argv))
