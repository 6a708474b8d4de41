"""The version of the client, for setuptools, the User-Agent header and `sluice version`."""

from __future__ import annotations

VERSION = "0.1.0"
