"""Loads job files of any dialect: returns a spec with warnings, or raises all problems at once.

Detects the dialect and calls its importer. Pure: no Django, no network, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.messages import Message, join_with_commas, msg
from jobs.jobfile.errors import (
    Loc,
    Problem,
    SpecError,
    SpecWarning,
    build_more_problem,
    format_path,
    limit_problems,
    nearest_position,
)
from jobs.jobfile.fields import describe_type
from jobs.jobfile.frameworks import FrameworkError, assign_roles, find_strategy
from jobs.jobfile.importers.draft import Draft, SiteCatalog
from jobs.jobfile.importers.ffdl import import_ffdl
from jobs.jobfile.importers.native import find_suspicious_values, import_native
from jobs.jobfile.importers.octopus import import_octopus
from jobs.jobfile.importers.openpai_v2 import import_openpai_v2
from jobs.jobfile.limits import EMPTY_DOCUMENT, DocumentSize, check_document
from jobs.jobfile.model import JobSpec
from jobs.jobfile.parse import ParsedFile, parse_text
from jobs.jobfile.validation import Positions, validate_document

__all__ = [
    "DIALECTS",
    "Dialect",
    "LoadResult",
    "SiteCatalog",
    "detect_dialect",
    "load_document",
    "load_text",
]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """An accepted job file."""

    spec: JobSpec
    warnings: tuple[SpecWarning, ...]
    dialect: str  # a Dialect's name
    format: str = "json"
    positions: Positions = field(default_factory=dict, repr=False)  # of the values in the text
    # Secrets must not be stored with the spec or shown.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variable → value
    # Image → login of its registry.
    image_logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    size: DocumentSize = EMPTY_DOCUMENT


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of job files and its importer."""

    name: str
    title: str  # shown to people
    identifying_fields: str  # fields by which the dialect is recognized; shown to people
    matches: Callable[[Mapping[str, Any]], bool]
    import_document: Callable[[Mapping[str, Any], SiteCatalog], Draft]


def _is_openpai_v2(document: Mapping[str, Any]) -> bool:
    return "protocolVersion" in document or (
        isinstance(document.get("taskRoles"), Mapping) and "jobName" not in document
    )


def _is_native(document: Mapping[str, Any]) -> bool:
    return "jobName" in document or "taskRoles" in document


def _is_octopus(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("config"), list)


def _is_ffdl(document: Mapping[str, Any]) -> bool:
    ffdl_keys = {"data_stores", "learners", "memory", "cpus", "gpus", "code_selector", "job_type"}
    return isinstance(document.get("framework"), Mapping) and not ffdl_keys.isdisjoint(document)


# The first dialect that matches a document imports it.
DIALECTS: tuple[Dialect, ...] = (
    Dialect("openpai-v2", "OpenPAI v2", "protocolVersion", _is_openpai_v2, import_openpai_v2),
    Dialect(
        "sluice",
        msg("import.job-file", "job file"),
        msg("import.jobname-list-taskroles", "jobName and a list taskRoles"),
        _is_native,
        import_native,
    ),
    Dialect(
        "octopus",
        "Octopus",
        msg("import.list-config-sub-tasks", "a list config of sub-tasks"),
        _is_octopus,
        import_octopus,
    ),
    Dialect(
        "ffdl",
        msg("import.ffdl-prophecis-manifest", "FfDL or Prophecis manifest"),
        msg(
            "import.framework-together-data-stores",
            "framework together with data_stores, learners, memory, cpus or gpus",
        ),
        _is_ffdl,
        import_ffdl,
    ),
)


def detect_dialect(document: Any) -> Dialect:
    """Detect the dialect of a document. Raises SpecError if no dialect matches."""
    if not isinstance(document, Mapping):
        raise SpecError.single(
            "",
            msg(
                "import.must-mapping-fields-not",
                "must be a mapping of fields, not %(kind)s.",
                kind=describe_type(document),
            ),
            code="not_a_mapping",
        )
    match = next((dialect for dialect in DIALECTS if dialect.matches(document)), None)
    if match is not None:
        return match
    if any(key.lower().replace("_", "") in ("jobname", "taskroles") for key in document):
        # Probably Sluice's own format with a misspelt key, which its validation reports with the correct key.
        return next(dialect for dialect in DIALECTS if dialect.name == "sluice")
    known = join_with_commas(
        [
            msg(
                "import.by",
                "%(title)s (recognized by %(sign)s)",
                title=dialect.title,
                sign=dialect.identifying_fields,
            )
            for dialect in DIALECTS
        ]
    )
    raise SpecError.single(
        "",
        msg(
            "import.no-known-format-known",
            "has an unknown format. Supported formats: %(known)s.",
            known=known,
        ),
        code="unknown_format",
    )


def load_text(
    text: str | bytes, *, filename: str = "", site: SiteCatalog | None = None
) -> LoadResult:
    """Load a job from the text of a file in any dialect. Raises SpecError."""
    return _load(parse_text(text, filename=filename), site or SiteCatalog())


def load_document(document: Any, *, site: SiteCatalog | None = None) -> LoadResult:
    """Load a job from values that are already parsed, such as the body of an API request. Raises SpecError."""
    check_document(document)
    return _load(ParsedFile(document, {}, "json"), site or SiteCatalog())


def _load(parsed: ParsedFile, site: SiteCatalog) -> LoadResult:
    dialect = detect_dialect(parsed.document)
    draft = dialect.import_document(parsed.document, site)
    size = check_document(draft.document, parsed.positions, draft.source_of)
    spec = _validate_draft(draft, parsed.positions, dialect.name)
    return LoadResult(
        spec=spec,
        warnings=tuple(_list_warnings(parsed, draft, spec)),
        dialect=dialect.name,
        format=parsed.format,
        positions=parsed.positions,
        secrets=draft.secrets,
        image_logins=draft.image_logins,
        size=size,
    )


def _list_warnings(parsed: ParsedFile, draft: Draft, spec: JobSpec) -> list[SpecWarning]:
    for loc, message in find_suspicious_values(spec):
        draft.add_warning(draft.source_of(loc), message)
    warnings = [_locate_warning(loc, message, parsed.positions) for loc, message in draft.warnings]
    more = draft.warning_count - len(warnings)
    if more:
        message = msg("import.more-warnings", "has %(more)s further warnings.", more=more)
        warnings.append(SpecWarning("", message))
    return [*parsed.warnings, *warnings]


def _validate_draft(draft: Draft, positions: Positions, dialect: str) -> JobSpec:
    problems: list[Problem] = [
        problem.with_position(nearest_position(positions, loc)) for loc, problem in draft.problems
    ]
    reported_paths = {problem.path for problem in problems}
    if draft.problem_count > len(problems):
        problems.append(build_more_problem(draft.problem_count - len(problems)))
    spec: JobSpec | None = None
    try:
        spec = validate_document(draft.document, positions=positions, source_of=draft.source_of)
    except SpecError as error:
        # If the importer has reported a problem for a path, it is more precise than that of the validation.
        problems += [problem for problem in error.problems if problem.path not in reported_paths]
    if (message := _check_framework(spec, draft.document)) is not None:
        loc = draft.source_of(("framework",))
        problem = Problem(format_path(loc), message, code="framework")
        problems.append(problem.with_position(nearest_position(positions, loc)))
    if spec is not None and not problems:
        return spec
    problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
    raise SpecError(limit_problems(problems), dialect=dialect)


def _check_framework(spec: JobSpec | None, document: Mapping[str, Any]) -> Message | None:
    """Check the names of framework and strategy, and if the spec is valid, its roles. Returns the problem or None."""
    try:
        if spec is not None:
            assign_roles(spec)
        elif isinstance(framework := document.get("framework"), Mapping):
            name, strategy = framework.get("name"), framework.get("strategy")
            if isinstance(name, str) and isinstance(strategy, str | None):
                find_strategy(name, strategy or "")
    except FrameworkError as error:
        return error.message
    return None


def _locate_warning(loc: Loc, message: Message, positions: Positions) -> SpecWarning:
    position = nearest_position(positions, loc)
    return SpecWarning(format_path(loc), message, position.line if position else None)
