"""Submission and preview of a job: parses the job file, resolves namespace, sizes, secrets and code.

The API, templates and pages use this module. It changes rows only through `jobs.actions`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from clusters.access import namespaces_submittable_by
from clusters.errors import IdentityRefused
from clusters.models import Cluster, Namespace, ResourceSpec, load_capacity
from core.errors import ClusterNotReady
from core.messages import _, join_messages, msg
from jobs.actions import (
    NewJob,
    PlannedJob,
    build_name_warnings,
    plan_new_job,
    store_jobs,
)
from jobs.jobfile import Code, JobSpec, Problem, SpecError, SpecWarning
from jobs.jobfile.errors import MAX_PROBLEMS, find_similar
from jobs.jobfile.framework_images import read_version
from jobs.jobfile.frameworks import normalize_framework
from jobs.jobfile.importers import SiteCatalog
from jobs.jobfile.limits import EMPTY_DOCUMENT, DocumentSize
from jobs.jobfile.validation import replace_fields
from jobs.models import CodeUpload, Job
from jobs.offload import load_document, load_text
from jobs.plan import Note, Plan, PlanError, find_start_obstacles
from jobs.script.host_names import find_ssh_limits
from jobs.script.paths import AttemptPaths
from jobs.script.render import RenderError, render_files
from jobs.script.runtime_limits import find_runtime_limits
from jobs.start_estimate import estimate_start
from jobs.store.access import jobs_visible_to
from jobs.store.cluster_render_options import build_render_options
from jobs.store.framework_images import load_framework_images
from jobs.store.job_names import JobNames
from jobs.store.submitter import Submitter

if TYPE_CHECKING:
    from accounts.models import User

_T = TypeVar("_T")
DEFAULT_NAMESPACE = "default"
# Job id in the paths of a previewed script. No job has it.
PREVIEW_JOB_ID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class JobFileSource:
    """A job file as sent, with the options of its submission. The file is `text`, or `document` if `text` is None.

    `name`, `namespace` and `code` replace the job file's own values. With `unique_name` a number is appended to a name
    that a job of the person has already; without it there is a warning.
    """

    text: bytes | str | None = None
    document: Any = None
    filename: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    image_logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    code: CodeUpload | None = None
    code_digest: str = ""  # SHA-256 of an upload, instead of `code`
    name: str = ""
    namespace: str = ""
    unique_name: bool = False
    cloned_from: UUID | None = None


@dataclass(frozen=True, slots=True)
class SubmissionRequest:
    """A parsed and validated job file with its namespace, secrets and code; not yet a job."""

    spec: JobSpec
    namespace: Namespace
    warnings: tuple[SpecWarning, ...]
    dialect: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    image_logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    code: CodeUpload | None = None
    cloned_from: UUID | None = None
    size: DocumentSize = EMPTY_DOCUMENT


def parse_submission(submitter: Submitter, source: JobFileSource) -> SubmissionRequest:
    """Parse one job file. Raises SpecError with all problems found, NotFound if there is no such upload."""
    submission = parse_job_file(submitter, source, build_site_catalog(submitter.user))
    names = JobNames(submitter.user)
    submission = choose_name(submission, names, unique_name=source.unique_name)
    return drop_unknown_origins(submitter, [submission])[0]


def parse_job_file(
    submitter: Submitter, source: JobFileSource, site: SiteCatalog
) -> SubmissionRequest:
    """Parse a job file and check it against its namespace and cluster. The names of other jobs are not considered."""
    code = source.code
    if code is None and source.code_digest:
        code = submitter.find_code(source.code_digest)
    loaded = (
        load_document(source.document, site=site)
        if source.text is None
        else load_text(source.text, filename=source.filename, site=site)
    )
    spec = _replace_values(loaded.spec, name=source.name, namespace=source.namespace, code=code)
    target, warnings = _resolve_namespace(spec, submitter)
    if target.name != spec.namespace:
        spec = spec.model_copy(update={"namespace": target.name})
    spec, version_warnings = _apply_framework_version(spec, target.cluster)
    warnings += version_warnings
    if code is None and spec.code is not None and spec.code.selector == "codeFile":
        raise SpecError.single(
            "code",
            _(
                "The job file requires uploaded code, but none was sent. Send the archive as “code”, or name an existing upload."
            ),
            code="code_missing",
        )
    warnings += _build_code_warnings(spec, has_upload=code is not None)
    logins = _select_logins(spec, {**loaded.image_logins, **source.image_logins})
    runtime = submitter.planner.render_options(target.cluster).runtime
    if runtime == "none":
        warnings += _build_dropped_login_warnings(logins)
        logins = {}
    limits = [*find_runtime_limits(spec, runtime), *find_ssh_limits(spec, runtime)]
    warnings += [SpecWarning(path, message) for path, message in limits]
    return SubmissionRequest(
        spec=spec,
        namespace=target,
        warnings=(*loaded.warnings, *warnings),
        dialect=loaded.dialect,
        secrets=_validate_secrets(spec, {**loaded.secrets, **source.secrets}),
        image_logins=logins,
        code=code,
        cloned_from=source.cloned_from,
        size=loaded.size,
    )


def choose_name(
    submission: SubmissionRequest, names: JobNames, *, unique_name: bool
) -> SubmissionRequest:
    """Replace a used name by a free one, or warn about it."""
    spec = submission.spec
    if not unique_name:
        warnings = build_name_warnings(names, spec.job_name)
        return _add_warnings(submission, warnings) if warnings else submission
    name = names.find_unused(spec.job_name)
    if name == spec.job_name:
        return submission
    return replace(submission, spec=spec.model_copy(update={"job_name": name}))


def _add_warnings(
    submission: SubmissionRequest, warnings: Iterable[SpecWarning]
) -> SubmissionRequest:
    return replace(submission, warnings=(*submission.warnings, *warnings))


def drop_unknown_origins(
    submitter: Submitter, submissions: Sequence[SubmissionRequest]
) -> list[SubmissionRequest]:
    """Remove `cloned_from` with a warning where no such job is visible: it may have been deleted meanwhile."""
    origins = {one.cloned_from for one in submissions if one.cloned_from is not None}
    visible = set[UUID]()
    if origins:
        jobs = jobs_visible_to(submitter.user).filter(pk__in=origins)
        visible = set(jobs.values_list("pk", flat=True))
    message = msg(
        "submission.clone-origin-unknown",
        "is ignored: the job does not exist, or you may not see it.",
    )
    return [
        one
        if one.cloned_from is None or one.cloned_from in visible
        else replace(_add_warnings(one, [SpecWarning("cloned_from", message)]), cloned_from=None)
        for one in submissions
    ]


def build_site_catalog(by: User) -> SiteCatalog:
    """Build the catalogue of sizes and storages, to which job files of other dialects refer by name."""
    return SiteCatalog(
        sizes=_LazyMapping(_load_sizes), storages=_LazyMapping(lambda: _load_storages(by))
    )


class _LazyMapping(Mapping[str, _T]):
    """A mapping that is loaded at its first use: most job files refer to no size or storage."""

    def __init__(self, load: Callable[[], Mapping[str, _T]]) -> None:
        self._load = load

    @cached_property
    def _rows(self) -> Mapping[str, _T]:
        return self._load()

    def __getitem__(self, name: str) -> _T:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _load_sizes() -> dict[str, dict[str, Any]]:
    """Return the fields of a TaskRole for each size, by the name of the size."""
    return {row.name: _build_size_fields(row) for row in ResourceSpec.objects.all()}


def _load_storages(by: User) -> dict[str, str]:
    """Return the directory of each storage on the clusters that the person can submit to.

    A name that stands for different directories on two clusters is left out.
    """
    directories: dict[str, str] = {}
    ambiguous = set()
    clusters = Cluster.objects.filter(namespaces__in=namespaces_submittable_by(by)).distinct()
    for storages in clusters.values_list("storages", flat=True):
        ambiguous |= {
            name
            for name, directory in storages.items()
            if directories.get(name, directory) != directory
        }
        directories |= storages
    return {name: path for name, path in directories.items() if name not in ambiguous}


def _build_size_fields(row: ResourceSpec) -> dict[str, Any]:
    size: dict[str, Any] = {
        "cpuNumber": row.cpus,
        "memoryMB": row.mem_mib,
        "gpuNumber": row.gpus,
        "gpuType": row.gpu_type,
    }
    if row.shm_mib is not None:
        size["shmMB"] = row.shm_mib
    return size


def _resolve_namespace(spec: JobSpec, submitter: Submitter) -> tuple[Namespace, list[SpecWarning]]:
    found = submitter.find_namespace(spec.namespace)
    if found is not None:
        return found, []
    submittable = submitter.submittable_namespaces
    if spec.namespace == DEFAULT_NAMESPACE and len(submittable) == 1:
        only = submittable[0]
        return only, [
            SpecWarning(
                "namespace",
                msg(
                    "submission.default-namespace",
                    "none is set; the job is submitted to %(name)s.",
                    name=only.name,
                ),
            )
        ]
    names = [namespace.name for namespace in submittable]
    near = find_similar(spec.namespace, names)
    known = (
        _("Your namespaces: %(names)s.", names=", ".join(names))
        if names
        else _("You are not a member of any namespace yet.")
    )
    raise SpecError.single(
        "namespace",
        join_messages(
            _(
                "the namespace %(namespace)s does not exist, or you are not a member.",
                namespace=spec.namespace,
            ),
            known,
        ),
        code="namespace_unknown",
        value=spec.namespace,
        suggestion=near,
    )


def _replace_values(
    spec: JobSpec, *, name: str, namespace: str, code: CodeUpload | None
) -> JobSpec:
    """Replace values of the job file by those of the request that are set. Raises SpecError."""
    changes: dict[str, Any] = {}
    if name:
        changes["jobName"] = name
    if namespace:
        changes["namespace"] = namespace
    if code is not None:
        changes["code"] = Code(selector="codeFile", upload_id=code.sha256).model_dump(by_alias=True)
    if not changes:
        return spec
    return replace_fields(spec, changes)


def _apply_framework_version(spec: JobSpec, cluster: Cluster) -> tuple[JobSpec, list[SpecWarning]]:
    """Set the job's image to the cluster's image of `framework.version`.

    Raises SpecError if there is no such image, or if an image in the job file states another version.
    """
    if spec.framework is None or not spec.framework.version:
        return spec, []
    framework, version = normalize_framework(spec.framework.name), spec.framework.version
    explicit = {"image": spec.image} | {
        f"taskRoles[{index}].image": role.image for index, role in enumerate(spec.task_roles)
    }
    stated = {path: read_version(framework, image) for path, image in explicit.items() if image}
    conflicts = [path for path, other in stated.items() if other and other != version]
    if conflicts:
        raise SpecError(
            Problem(
                path,
                _(
                    "is %(framework)s %(other)s, but framework.version is %(version)s; remove one of them.",
                    framework=framework,
                    other=stated[path],
                    version=version,
                ),
                "version_conflict",
                value=explicit[path],
            )
            for path in conflicts
        )
    if spec.image or all(role.image for role in spec.task_roles):
        unused = [path for path, other in stated.items() if not other]
        return spec, [_build_unused_version_warning(path, version) for path in unused[:1]]
    return spec.model_copy(update={"image": _find_framework_image(framework, version, cluster)}), []


def _build_unused_version_warning(path: str, version: str) -> SpecWarning:
    return SpecWarning(
        "framework.version",
        msg(
            "submission.version-unused",
            "%(path)s names the container image, so %(version)s selects none.",
            path=path,
            version=version,
        ),
    )


def _find_framework_image(framework: str, version: str, cluster: Cluster) -> str:
    images = [row for row in load_framework_images(cluster) if row.framework == framework]
    found = next((row.image for row in images if row.version == version), None)
    if found is not None:
        return found
    known = (
        _("It has: %(versions)s.", versions=", ".join(row.version for row in images))
        if images
        else _("It has no image of this framework that states a version; set image instead.")
    )
    versions = [row.version for row in images]
    raise SpecError.single(
        "framework.version",
        join_messages(
            _(
                "cluster %(cluster)s has no image of %(framework)s %(version)s.",
                cluster=cluster.name,
                framework=framework,
                version=version,
            ),
            known,
        ),
        code="version_unknown",
        value=version,
        suggestion=find_similar(version, versions),
    )


def _build_code_warnings(spec: JobSpec, *, has_upload: bool) -> Iterator[SpecWarning]:
    """Warn about a codeDir without effect, and about commands that look for the code in MODEL_DIR, as in FfDL."""
    if has_upload and spec.code_dir:
        yield SpecWarning(
            "codeDir", msg("submission.code-dir-ignored", "is ignored: the uploaded code is used.")
        )
    if spec.imported_from == "ffdl" or spec.model_dir or not (has_upload or spec.code_dir):
        return
    for index, role in enumerate(spec.task_roles):
        if re.search(r"\bMODEL_DIR\b", role.command):
            yield SpecWarning(
                f"taskRoles[{index}].command",
                msg(
                    "submission.model-dir-is-not-the-code",
                    "MODEL_DIR is the directory for models; the code is in the working directory, PAI_CODE_DIR.",
                ),
            )


def _validate_secrets(spec: JobSpec, values: Mapping[str, str]) -> dict[str, str]:
    declared = frozenset(spec.secrets)
    problems = [
        Problem(
            f"secrets.{name}"[:100],
            _("is not among the job file's secrets."),
            "secret_unknown",
            suggestion=find_similar(name, spec.secrets),
        )
        for name in islice((name for name in values if name not in declared), MAX_PROBLEMS)
    ]
    problems += [
        Problem(f"secrets.{name}", _("is required: the job file names it."), "secret_missing")
        for name in spec.secrets
        if name not in values
    ]
    if problems:
        raise SpecError(problems)
    return dict(values)


def _select_logins(
    spec: JobSpec, given: Mapping[str, Mapping[str, str]]
) -> dict[str, Mapping[str, str]]:
    """Select the complete registry logins of images that the job uses."""
    images = {spec.image_of(role) for role in spec.task_roles}
    return {
        image: login
        for image, login in given.items()
        if image in images and {"username", "password"} <= set(login)
    }


def _build_dropped_login_warnings(logins: Collection[str]) -> list[SpecWarning]:
    if not logins:
        return []
    images = ", ".join(sorted(logins))
    return [
        SpecWarning(
            "prerequisites",
            msg(
                "submission.login-not-passed",
                "this cluster runs jobs without containers: the login for %(images)s is not used.",
                images=images,
            ),
        )
    ]


def plan_submission(submitter: Submitter, submission: SubmissionRequest) -> PlannedJob:
    """Check permission and plan. Raises NotAllowed, PlanError, ClusterNotReady, ClusterError."""
    new_job = NewJob(
        spec=submission.spec,
        namespace=submission.namespace,
        secrets=submission.secrets,
        image_logins=submission.image_logins,
        warnings=[warning.serialize() for warning in submission.warnings],
        labels=submission.spec.labels,
        code_upload=submission.code,
        cloned_from=submission.cloned_from,
    )
    return plan_new_job(submitter, new_job)


def prepare_submission(
    submitter: Submitter, submission: SubmissionRequest
) -> Callable[[], list[Job]]:
    """Plan a job, and return the function that stores it. Raises like `plan_submission`."""
    planned = plan_submission(submitter, submission)
    return lambda: store_jobs(by=submitter.user, planned_jobs=[planned])


@dataclass(frozen=True, slots=True)
class Preview:
    """The result of planning a submission without creating a job."""

    submission: SubmissionRequest
    plan: Plan | None = None
    starts_now: bool | None = None  # None: the cluster's capacity is not known yet
    # An estimate of `jobs.start_estimate`; only set if the job cannot start now.
    expected_start: datetime | None = None
    obstacles: tuple[Note, ...] = ()
    script: str = ""
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def preview(submitter: Submitter, submission: SubmissionRequest) -> Preview:
    """Plan a submission, render its script and list what prevents an immediate start.

    Reads only the database, never the cluster.
    """
    try:
        job_plan = submitter.planner.plan(spec=submission.spec, namespace=submission.namespace)
    except PlanError as error:
        return Preview(submission, problems=error.problems)
    except ClusterNotReady as error:
        return Preview(submission, problems=(Problem("", error.user_message, error.code),))
    capacity = load_capacity(submission.namespace.cluster)
    obstacles = find_start_obstacles(job_plan, capacity) if capacity else None
    problems: list[Problem] = []
    script = ""
    try:
        script = _render_script(
            submission, job_plan, submitter.unix_user_on(submission.namespace.cluster)
        )
    except RenderError as error:
        problems.append(Problem("", error.message, "cannot_run"))
    except IdentityRefused as error:
        problems.append(Problem("", error.user_message, "cannot_run"))
    return Preview(
        submission,
        plan=job_plan,
        starts_now=None if obstacles is None else not obstacles,
        expected_start=estimate_start(submission.namespace.cluster, job_plan)
        if obstacles
        else None,
        obstacles=obstacles or (),
        script=script,
        problems=tuple(problems),
    )


def _render_script(submission: SubmissionRequest, job_plan: Plan, unix_user: str) -> str:
    """Render the batch script as the engine does, but assume that the home directory is /home/<user>."""
    cluster = submission.namespace.cluster
    home = f"/home/{unix_user}"
    options = build_render_options(
        cluster, image_cache_dir=cluster.image_cache_for(unix_user, home)
    )
    paths = AttemptPaths(cluster.work_root_for(unix_user, home), PREVIEW_JOB_ID, 1)
    rendered = render_files(
        job_plan,
        submission.spec,
        paths,
        user=unix_user,
        options=options,
        default_image=submission.namespace.default_image,
        image_logins=submission.image_logins,
    )
    return rendered["batch.sh"]
