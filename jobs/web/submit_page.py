"""The submit page, and the endpoint that checks a job file and returns its problems, plan and script.

In the browser the page has one document, which its form and its editor show and change. The form is built from
`jobs.form_description`. The page submits jobs, uploads code and saves templates through the REST API; this module
writes nothing.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.urls import reverse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, pgettext
from django.views.decorators.http import require_POST, require_safe

from clusters.access import can_submit, namespaces_submittable_by, namespaces_visible_to
from clusters.capacity import Capacity
from clusters.models import CapacitySnapshot, Namespace, ResourceSpec
from core.errors import ActionRefused, TooManyRequests
from core.translation import translate
from jobs.actions import find_unused_name, load_spec
from jobs.form_description import describe_form
from jobs.job_templates import find_template
from jobs.jobfile import Problem, SpecError, dump_document, to_document
from jobs.jobfile.errors import parse_path
from jobs.jobfile.framework_images import FrameworkImage
from jobs.jobfile.frameworks import STRATEGIES, build_roles
from jobs.jobfile.limits import check_document
from jobs.jobfile.validation import Positions
from jobs.models import Job, JobTemplate
from jobs.offload import load_text, parse_text
from jobs.presentation import format_plan, format_problem, serialize_problem, serialize_warning
from jobs.request_limits import planning_slot
from jobs.store.framework_images import load_framework_images
from jobs.store.submitter import Submitter
from jobs.submission import (
    JobFileSource,
    Preview,
    build_site_catalog,
    parse_submission,
    preview,
)
from jobs.web.job_page import find_job_or_404
from jobs.web.layout import get_current_namespace

if TYPE_CHECKING:
    from accounts.models import User

Format = Literal["json", "yaml"]
MAX_BODY_BYTES = 2 * 1024 * 1024
# The command of the default job: runs in any image with a shell and writes to its log for 20 seconds.
DEFAULT_COMMAND = """\
for step in 1 2 3 4 5 6 7 8 9 10; do
  echo "step $step of 10 on $(hostname)"
  sleep 2
done
echo "done"
"""
FALLBACK_IMAGE = "busybox"
PLACEHOLDER_FOR_SECRETS = "-"
DEFAULT_TASK_COUNTS = {"worker": 2}
STRATEGY_TITLES = {
    "tensorflow/ps": gettext_lazy("TensorFlow, parameter servers"),
    "tensorflow/multiworker": gettext_lazy("TensorFlow, all-reduce between workers"),
    "pytorch/ddp": gettext_lazy("PyTorch, distributed data parallel"),
    "pytorch/torchrun": gettext_lazy("PyTorch, started by torchrun"),
    "horovod/ring": gettext_lazy("Horovod, ring all-reduce over Gloo"),
    "horovod/horovodrun": gettext_lazy("Horovod, started by horovodrun"),
    "mxnet/ps": gettext_lazy("MXNet, parameter servers"),
    "xgboost/rabit": gettext_lazy("XGBoost, all-reduce"),
    "paddle/collective": gettext_lazy("PaddlePaddle, collective"),
    "mindspore/collective": gettext_lazy("MindSpore, collective"),
    "mpi/srun": gettext_lazy("MPI, started by srun"),
    "mpi/hostfile": gettext_lazy("MPI, started by mpirun in the first task"),
}
DIALECT_TITLES = {
    "sluice": gettext_lazy("job file"),
    "openpai-v2": gettext_lazy("OpenPAI v2"),
    "octopus": gettext_lazy("Octopus"),
    "ffdl": gettext_lazy("FfDL or Prophecis manifest"),
}
ACE_FILES = (
    "ace.js",
    "ext-language_tools.js",
    "ext-searchbox.js",
    "mode-json.js",
    "mode-yaml.js",
    "theme-github_light_default.js",
    "theme-github_dark.js",
)


def list_ace_urls() -> list[str]:
    """Return the URLs of the scripts of the Ace editor."""
    return [static(f"vendor/ace/{name}") for name in ACE_FILES]


@require_safe
@login_required
def submit_page(request: HttpRequest) -> HttpResponse:
    user = cast("User", request.user)
    if template_id := request.GET.get("template"):
        return _submit_from_template(request, template_id)
    if job_id := request.GET.get("clone"):
        job = find_job_or_404(request, job_id)
        document = build_clone_document(user, job)
        return render_submit(
            request, document, origin=_("a copy of a job"), cloned_from=str(job.pk)
        )
    return render_submit(request, build_default_document(request, user))


def _submit_from_template(request: HttpRequest, template_id: str) -> HttpResponse:
    """Open the submit page with the template's job file.

    If the template has parameters, redirect to the page that asks for their values; that page opens the submit page.
    """
    template = get_template_or_404(request, template_id)
    if template.parameters:
        return HttpResponseRedirect(reverse("template_use", args=[template.pk]))
    return render_submit(request, template.spec, origin=template.name)


def get_template_or_404(request: HttpRequest, template_id: Any) -> JobTemplate:
    try:
        return find_template(id=uuid.UUID(str(template_id)), by=cast("User", request.user))
    except (ValueError, ActionRefused) as problem:
        raise Http404 from problem


def build_clone_document(user: User, job: Job) -> dict[str, Any]:
    document = to_document(load_spec(job))
    document["jobName"] = find_unused_name(user, job.name)
    return document


def render_submit(
    request: HttpRequest, document: Mapping[str, Any], *, origin: str = "", cloned_from: str = ""
) -> HttpResponse:
    """Render the submit page with a job file. `origin` names the job or template from which the job file comes."""
    user = cast("User", request.user)
    offered = list_submittable_namespaces(user)
    offered_names = {namespace["name"] for namespace in offered}
    presets = list_framework_presets()
    context = {
        "offered": offered,
        "closed": [
            name
            for name in namespaces_visible_to(user).values_list("name", flat=True)
            if name not in offered_names
        ],
        "presets": presets,
        "form": describe_form(),
        "page": {
            "document": document,
            "origin": origin,
            "clonedFrom": cloned_from,
            "user": user.pk,
            "namespaces": offered,
            "presets": presets,
            "ace": list_ace_urls(),
            "check": reverse("submit_check"),
            "jobs": "/api/v1/jobs",
            "uploads": "/api/v1/uploads",
            "templates": "/api/v1/templates",
            "schema": "/api/v1/job-file-schema",
            "jobPage": reverse("jobs"),
            "templatePage": reverse("templates"),
            "login": reverse("login"),
        },
    }
    return render(request, "submit/submit.html", context)


# --- options of the form -----------------------------------------------------------------------------


def list_submittable_namespaces(user: User) -> list[dict[str, Any]]:
    """List the namespaces that the user can submit to, with their sizes, GPU types and images."""
    rows = list(namespaces_submittable_by(user).select_related("cluster").order_by("name"))
    snapshots = {
        row.cluster_id: Capacity.from_json(row.data)
        for row in CapacitySnapshot.objects.filter(cluster__in={row.cluster_id for row in rows})
    }
    images = {
        cluster.pk: load_framework_images(cluster)
        for cluster in {row.cluster_id: row.cluster for row in rows}.values()
    }
    return [
        _build_namespace_options(row, snapshots.get(row.cluster_id), images[row.cluster_id])
        for row in rows
    ]


def _build_namespace_options(
    namespace: Namespace, capacity: Capacity | None, framework_images: Iterable[FrameworkImage]
) -> dict[str, Any]:
    gpu_types: set[str] = set()
    if capacity is not None:
        for partition in namespace.partitions:
            gpu_types |= {
                gpu.type for node in capacity.nodes_in_partition(partition) for gpu in node.gpus
            }
    versions: dict[str, list[str]] = {}
    for row in framework_images:
        versions.setdefault(row.framework, []).append(row.version)
    return {
        "name": namespace.name,
        "description": namespace.description,
        "defaultImage": namespace.default_image,
        "images": sorted(
            {*namespace.cluster.image_aliases, *(row.image for row in framework_images)}
        ),
        "versions": versions,
        "maxTime": namespace.max_time_s,
        "defaultTime": namespace.default_time_s,
        "gpuTypes": sorted(gpu_type for gpu_type in gpu_types if gpu_type),
        "sizes": [
            {
                "name": size.name,
                "title": size.title,
                "cpuNumber": size.cpus,
                "memoryMB": size.mem_mib,
                "gpuNumber": size.gpus,
                "gpuType": size.gpu_type,
                "shmMB": size.shm_mib,
                "price": float(size.price),
            }
            for size in ResourceSpec.offered_in(namespace)
        ],
    }


def list_framework_presets() -> list[dict[str, Any]]:
    """List the frameworks and strategies with the roles that each requires."""
    rows = []
    for strategy in STRATEGIES:
        counts = {
            role_name: DEFAULT_TASK_COUNTS.get(role_name, 1) for role_name in strategy.required
        }
        roles = build_roles(strategy.framework, strategy.name, command="true", counts=counts)
        rows.append(
            {
                "framework": strategy.framework,
                "strategy": strategy.name,
                "title": str(
                    STRATEGY_TITLES.get(f"{strategy.framework}/{strategy.name}", strategy.title)
                ),
                "variables": list(strategy.variables),
                "roles": [
                    {
                        "name": role.name,
                        "taskNumber": role.task_number,
                        "minSucceededTaskCount": role.min_succeeded_task_count,
                        "serves": role.name in ("ps", "scheduler"),
                    }
                    for role in roles
                ],
            }
        )
    return rows


def build_default_document(request: HttpRequest, user: User) -> dict[str, Any]:
    """Build a small job file that runs without changes."""
    namespace = _choose_default_namespace(request, user)
    size = (
        ResourceSpec.offered_in(namespace).filter(gpus=0).order_by("cpus", "mem_mib").first()
        if namespace
        else None
    )
    role: dict[str, Any] = {
        "name": "main",
        "taskNumber": 1,
        "cpuNumber": size.cpus if size else 1,
        "memoryMB": size.mem_mib if size else 500,
        "shmMB": 64,
        "gpuNumber": 0,
        "command": DEFAULT_COMMAND,
        "portList": [],
        "minFailedTaskCount": 1,
        "minSucceededTaskCount": None,
    }
    return {
        "jobName": find_unused_name(
            user, pgettext("name of the first job; letters, digits, -", "hello")
        ),
        "namespace": namespace.name if namespace else "default",
        "image": "" if namespace and namespace.default_image else FALLBACK_IMAGE,
        "retryCount": 0,
        "taskRoles": [role],
    }


def _choose_default_namespace(request: HttpRequest, user: User) -> Namespace | None:
    current = get_current_namespace(request)
    if current is not None and can_submit(user, current):
        return current
    rows = namespaces_submittable_by(user).order_by("name")
    return rows.filter(name="default").first() or rows.first()


# --- the check ----------------------------------------------------------------------------------------


@require_POST
def check_job_file_view(request: HttpRequest) -> HttpResponse:
    """Check a job file, given as text or document; responds with document, problems, plan and script."""
    if not request.user.is_authenticated:
        return JsonResponse({"detail": _("Your session has ended.")}, status=401)
    if len(request.body) > MAX_BODY_BYTES:
        return JsonResponse({"detail": _("The job file is too large.")}, status=413)
    try:
        body = json.loads(request.body)
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError):
        return JsonResponse({"detail": _("The request could not be parsed.")}, status=400)
    try:
        with planning_slot(request.user):
            result = check_job_file(request.user, body)
    except TooManyRequests as error:
        return respond_too_many(error)
    return JsonResponse(result, json_dumps_params={"ensure_ascii": False})


def respond_too_many(error: TooManyRequests) -> HttpResponse:
    """Respond to a check that was refused because of a limit; the page sends it again later."""
    response = JsonResponse({"detail": translate(error.user_message)}, status=429)
    response["Retry-After"] = str(math.ceil(error.retry_after_s))
    return response


def check_job_file(user: User, body: Mapping[str, Any]) -> dict[str, Any]:
    """Check the job file of a request's body; see `check_job_file_view`.

    With `import` in the body, the returned text is the job file converted to `format`, not the text that was sent.
    """
    format_: Format = "yaml" if body.get("format") == "yaml" else "json"
    text = body.get("text")
    filename = str(body.get("filename", ""))[:255]
    result: dict[str, Any] = {"text": text, "document": None, "problems": [], "warnings": []}
    try:
        if not isinstance(text, str):
            check_document(body.get("document"))
            # Convert the document to text and parse that, so that every problem has a path and a line.
            result["text"] = text = dump_document(body.get("document"), format_)
            filename = f"job.{format_}"
        loaded = load_text(text, filename=filename, site=build_site_catalog(user))
    except SpecError as error:
        return result | _describe_parse_error(error, result["text"], filename)
    document = to_document(loaded.spec)
    result |= {
        "dialect": loaded.dialect,
        "dialectTitle": str(DIALECT_TITLES.get(loaded.dialect, loaded.dialect)),
        "document": document,
        # Secrets found in the imported text are returned to the page; the server does not store them.
        "secrets": dict(loaded.secrets),
        "imageLogins": _select_complete_logins(loaded.image_logins),
        "warnings": [serialize_warning(warning) for warning in loaded.warnings],
    }
    if body.get("import"):
        result["text"] = dump_document(document, format_)
    # A file in another dialect has other paths than the problems, so it has no line numbers for them.
    positions = loaded.positions if loaded.dialect == "sluice" else {}
    code = body.get("code")
    submitter = Submitter(user)
    source = JobFileSource(
        document=document,
        secrets={**loaded.secrets, **_build_secret_placeholders(body.get("secrets"))},
        image_logins=loaded.image_logins,
        code_digest=code if isinstance(code, str) else "",
    )
    try:
        submission = parse_submission(submitter, source)
    except SpecError as error:
        return result | {"problems": _build_problem_rows(error.problems, positions)}
    except ActionRefused as error:
        return result | {
            "problems": [
                {"path": "code", "message": translate(error.user_message), "code": error.code}
            ]
        }
    shown = {(row["path"], row["message"]) for row in result["warnings"]}
    result["warnings"] += [
        row
        for warning in submission.warnings
        if ((row := serialize_warning(warning))["path"], row["message"]) not in shown
    ]
    job_preview = preview(submitter, submission)
    result["problems"] = _build_problem_rows(job_preview.problems, positions)
    if not submitter.can_submit(submission.namespace):
        result["problems"].append(
            {
                "path": "namespace",
                "line": find_line("namespace", positions),
                "code": "not_allowed",
                "message": _("You can view namespace %(name)s but cannot submit jobs to it.")
                % {"name": submission.namespace.name},
            }
        )
    result["preview"] = _serialize_preview(job_preview)
    return result


def _build_problem_rows(problems: Iterable[Problem], positions: Positions) -> list[dict[str, Any]]:
    """Serialize problems. A problem without a line, because it was found after parsing, gets that of its path."""
    rows = []
    for problem in problems:
        values = {
            key: value for key, value in serialize_problem(problem).items() if value is not None
        }
        line = find_line(problem.path, positions)
        rows.append({"line": line, **values, "message": format_problem(problem)})
    return rows


def _build_secret_placeholders(names: Any) -> dict[str, str]:
    """Build placeholder values for secrets. The real values stay in the browser until the job is submitted."""
    return {str(name): PLACEHOLDER_FOR_SECRETS for name in names} if isinstance(names, list) else {}


def _select_complete_logins(logins: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Select the registry logins that have a user name and a password, as the API requires both."""
    return {
        image: {"username": login["username"], "password": login["password"]}
        for image, login in logins.items()
        if login.get("username") and login.get("password")
    }


def _describe_parse_error(error: SpecError, text: str | None, filename: str) -> dict[str, Any]:
    """Return the problems and, if the text can be parsed, the document, so that the form can show both."""
    document = None
    positions: Positions = {}
    try:
        parsed = parse_text(text or "", filename=filename)
        if isinstance(parsed.document, dict) and isinstance(parsed.document.get("taskRoles"), list):
            document = parsed.document
        positions = parsed.positions
    except SpecError:
        pass  # the text is neither valid YAML nor valid JSON; the problems contain the position
    return {
        "problems": _build_problem_rows(error.problems, positions),
        "document": document,
        "dialect": error.dialect,
    }


def find_line(path: str, positions: Positions) -> int | None:
    """Return the line of the value at a path; None if the text has no such value."""
    position = positions.get(parse_path(path))
    return position.line if position else None


def _serialize_preview(job_preview: Preview) -> dict[str, Any] | None:
    plan = job_preview.plan
    if plan is None:
        return None
    start = job_preview.expected_start
    return {
        "lines": format_plan(plan),
        "notes": [translate(note.message) for note in plan.notes],
        "startsNow": job_preview.starts_now,
        "obstacles": [translate(note.message) for note in job_preview.obstacles],
        "expectedStart": start.isoformat() if start else None,
        "machineHours": plan.totals.machine_hours,
        "gpuHours": plan.totals.gpu_hours,
        "nodeHours": plan.totals.node_hours,
        "timeLimit": plan.time_limit_s,
        "totals": {
            "tasks": plan.totals.tasks,
            "nodes": plan.totals.nodes,
            "cpus": plan.totals.cpus,
            "memory": plan.totals.mem_mib,
            "gpus": sum(plan.totals.gpus.values()),
        },
        "asOf": timezone.now().isoformat(),
        "script": job_preview.script,
    }
