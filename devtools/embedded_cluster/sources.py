"""Reads the machine's package sources from /etc/apt.

Never writes to the machine's apt configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackageSource:
    """A package source of apt; `signed_by` is the file of its signing key, or empty."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str


def parse_one_line(text: str) -> list[PackageSource]:
    """Parse the one-line format of sources.list(5)."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+)", line)
        if match:
            options, uri, suite, components = match.groups()
            signed = re.search(r"signed-by=(\S+)", options or "")
            found.append(
                PackageSource(uri, (suite,), tuple(components.split()), signed[1] if signed else "")
            )
    return found


def parse_deb822(text: str) -> list[PackageSource]:
    """Parse the deb822 format of sources.list(5)."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        # Lines that start with a space continue a field and are skipped: only an inline key has them.
        fields = {
            name.strip().lower(): value.strip()
            for name, sign, value in (line.partition(":") for line in lines)
            if sign and not name.startswith(" ")
        }
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
            continue
        key = fields.get("signed-by", "")
        for uri in fields.get("uris", "").split():
            found.append(
                PackageSource(
                    uri,
                    tuple(fields.get("suites", "").split()),
                    tuple(fields.get("components", "").split()),
                    key if key.startswith("/") else "",
                )
            )
    return found


def read_machine_sources(apt: Path = Path("/etc/apt")) -> list[PackageSource]:
    found = []
    if (apt / "sources.list").is_file():
        found += parse_one_line((apt / "sources.list").read_text(errors="replace"))
    for path in sorted((apt / "sources.list.d").glob("*")):
        if path.suffix == ".list":
            found += parse_one_line(path.read_text(errors="replace"))
        elif path.suffix == ".sources":
            found += parse_deb822(path.read_text(errors="replace"))
    return found


def read_os_release() -> dict[str, str]:
    pairs = (line.partition("=") for line in Path("/etc/os-release").read_text().splitlines())
    return {name: value.strip('"') for name, _, value in pairs}


def read_distribution_sources() -> list[PackageSource]:
    """Return the sources of the distribution's release, updates and security fixes, without third-party sources."""
    codename = read_os_release().get("VERSION_CODENAME", "")
    found = []
    for source in read_machine_sources():
        suites = tuple(
            suite for suite in source.suites if codename and suite.split("-")[0] == codename
        )
        if suites and "main" in source.components:
            found.append(PackageSource(source.uri, suites, source.components, source.signed_by))
    return found
