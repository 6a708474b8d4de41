"""Loads job files: small ones in the request's thread, large ones in a worker process (`core.workers`).

The functions have the signatures of those in `jobs.jobfile`. Requests use these; the pure package does not know processes.
"""

from __future__ import annotations

from typing import Any

from core.workers import run_in_worker
from jobs.jobfile import importers, parse
from jobs.jobfile.importers import LoadResult, SiteCatalog
from jobs.jobfile.limits import check_document
from jobs.jobfile.parse import ParsedFile

# A larger job file takes more than about 20 ms to load; ordinary ones have 1 to 4 KiB and fewer than 100 values.
MAX_CHARS_IN_REQUEST = 16 * 1024
MAX_VALUES_IN_REQUEST = 500


def load_text(
    text: str | bytes, *, filename: str = "", site: SiteCatalog | None = None
) -> LoadResult:
    if len(text) <= MAX_CHARS_IN_REQUEST:
        return importers.load_text(text, filename=filename, site=site)
    return run_in_worker(_load_text, text, filename, _copy_site(site))


def load_document(document: Any, *, site: SiteCatalog | None = None) -> LoadResult:
    if not is_large(document):
        return importers.load_document(document, site=site)
    # Stops at the first value above a limit. To pickle hundreds of thousands of values would take longer.
    check_document(document)
    return run_in_worker(_load_document, document, _copy_site(site))


def parse_text(text: str | bytes, *, filename: str = "") -> ParsedFile:
    if len(text) <= MAX_CHARS_IN_REQUEST:
        return parse.parse_text(text, filename=filename)
    return run_in_worker(_parse_text, text, filename)


def is_large(document: Any) -> bool:
    """Whether the document exceeds the limits above. Stops counting there."""
    values, characters = 0, 0
    rest = [document]
    while rest:
        value = rest.pop()
        values += 1
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, dict):
            # Before the values are added: a mapping of a million entries is not copied.
            values += len(value)
            characters += sum(len(key) for key in value) if values <= MAX_VALUES_IN_REQUEST else 0
        elif isinstance(value, list):
            values += len(value)
        if values > MAX_VALUES_IN_REQUEST or characters > MAX_CHARS_IN_REQUEST:
            return True
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
    return False


def _copy_site(site: SiteCatalog | None) -> SiteCatalog:
    """Read the catalogue's tables, which a request reads only when the job file names one of their rows."""
    if site is None:
        return SiteCatalog()
    return SiteCatalog(storages=dict(site.storages), sizes=dict(site.sizes))


# Functions of the worker process.


def _load_text(text: str | bytes, filename: str, site: SiteCatalog) -> LoadResult:
    return importers.load_text(text, filename=filename, site=site)


def _load_document(document: Any, site: SiteCatalog) -> LoadResult:
    return importers.load_document(document, site=site)


def _parse_text(text: str | bytes, filename: str) -> ParsedFile:
    return parse.parse_text(text, filename=filename)
