"""Pages of templates: the list, the editor, and the form for a template's parameters.

The forms work without JavaScript; with it, an editor replaces the text field of the job file. Permissions and
validation are in `jobs.job_templates`.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext_lazy
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from clusters.access import namespaces_submittable_by, namespaces_visible_to
from clusters.errors import ClusterError
from core import messages as core_messages
from core.api.idempotency import compute_fingerprint
from core.errors import ActionRefused, TooManyRequests, VersionConflict
from core.translation import translate
from jobs import job_templates
from jobs.actions import create_once
from jobs.api.templates import filter_by_search_words
from jobs.form_description import describe_form
from jobs.jobfile import Problem, SpecError, dump_document, to_document
from jobs.jobfile.parameters import (
    PARAMETER_KINDS,
    TemplateParameter,
    check_parameters,
    fill_template,
    find_parameter_names,
)
from jobs.jobfile.validation import Positions
from jobs.models import Job, JobTemplate
from jobs.offload import load_document, parse_text
from jobs.plan import PlanError
from jobs.presentation import format_problem, serialize_problem
from jobs.request_limits import planning_slot
from jobs.store.submitter import Submitter
from jobs.submission import prepare_submission
from jobs.web.job_list import parse_ids
from jobs.web.job_page import find_job_or_404
from jobs.web.submit_page import (
    build_default_document,
    find_line,
    get_template_or_404,
    list_ace_urls,
    render_submit,
    respond_too_many,
)

if TYPE_CHECKING:
    from accounts.models import User

TEMPLATES_PER_PAGE = 50
MAX_SELECTED_TEMPLATES = 500
SCOPES = ("mine", "namespace", "public", "all")
KIND_LABELS = {
    "text": pgettext_lazy("kind of value", "text"),
    "whole": pgettext_lazy("kind of value", "whole number"),
    "number": pgettext_lazy("kind of value", "number"),
    "flag": pgettext_lazy("kind of value", "yes or no"),
    "choice": pgettext_lazy("kind of value", "choice"),
}


def current_user(request: HttpRequest) -> User:
    return cast("User", request.user)


# --- the list -------------------------------------------------------------------------------------------


@require_safe
@login_required
def template_list(request: HttpRequest) -> HttpResponse:
    user = current_user(request)
    scope = request.GET.get("scope", "all")
    scope = scope if scope in SCOPES else "all"
    search = request.GET.get("q", "")[:200]
    rows = job_templates.templates_visible_to(user).select_related("owner", "namespace")
    if scope == "mine":
        rows = rows.filter(owner=user)
    elif scope in ("namespace", "public"):
        rows = rows.filter(visibility=scope)
    rows = filter_by_search_words(rows, search).order_by("-updated_at", "-id")
    page = Paginator(rows, TEMPLATES_PER_PAGE).get_page(request.GET.get("page"))
    for row in page.object_list:
        row.may_change = job_templates.can_edit_template(user, row)  # type: ignore[attr-defined]
    context = {
        "page": page,
        "scope": scope,
        "search": search,
        "scopes": [
            ("all", _("All")),
            ("mine", _("Mine")),
            ("namespace", _("My namespaces")),
            ("public", _("Public")),
        ],
    }
    return render(request, "templates/list.html", context)


@require_POST
@login_required
def template_copy(request: HttpRequest, template_id: uuid.UUID) -> HttpResponse:
    template = get_template_or_404(request, template_id)
    copy = job_templates.copy_template(template=template, by=current_user(request))
    messages.success(request, _("Template copied. Only you can see the copy."))
    return HttpResponseRedirect(reverse("template", args=[copy.pk]))


@require_POST
@login_required
def delete_templates(request: HttpRequest) -> HttpResponse:
    """Delete the selected templates. A failure is reported and does not affect the other templates."""
    user = current_user(request)
    ids = parse_ids(request.POST.getlist("id")[:MAX_SELECTED_TEMPLATES])
    selected = job_templates.templates_visible_to(user).filter(pk__in=ids)
    deleted_count = 0
    for template in selected.select_related("namespace"):
        try:
            job_templates.delete_template(template=template, by=user)
            deleted_count += 1
        except ActionRefused as problem:
            messages.error(request, f"{template.name}: {translate(problem.user_message)}")
    if deleted_count:
        text = ngettext(
            "%(count)s template deleted.", "%(count)s templates deleted.", deleted_count
        )
        messages.success(request, text % {"count": deleted_count})
    return HttpResponseRedirect(reverse("templates"))


# --- the editor ------------------------------------------------------------------------------------------


@dataclass
class TemplateFormData:
    """The values of the template form as the person entered them; they may be invalid. `text` is the job file."""

    name: str = ""
    description: str = ""
    visibility: str = JobTemplate.Visibility.PRIVATE
    namespace: str = ""
    text: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    version: int = 0

    @classmethod
    def from_template(cls, template: JobTemplate) -> TemplateFormData:
        return cls(
            name=template.name,
            description=template.description,
            visibility=template.visibility,
            namespace=template.namespace.name if template.namespace else "",
            text=dump_document(template.spec, "yaml"),
            rows=[_build_parameter_row(parameter) for parameter in template.parameters],
            version=template.version,
        )

    @classmethod
    def from_request(cls, request: HttpRequest) -> TemplateFormData:
        data = request.POST
        names = ("name", "title", "description", "kind", "required", "default", "choices")
        columns = [data.getlist(f"parameter_{name}") for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=False)]
        version = data.get("version", "")
        return cls(
            name=data.get("name", "").strip(),
            description=data.get("description", "").strip(),
            visibility=data.get("visibility", ""),
            namespace=data.get("namespace", ""),
            text=data.get("job_file", "").replace("\r\n", "\n"),
            rows=[row for row in rows if any(str(row[name]).strip() for name in names[:3])],
            version=int(version) if version.isdecimal() else 0,
        )

    def parameters(self) -> list[TemplateParameter]:
        return [_parse_parameter(row) for row in self.rows]

    def check(self) -> list[Problem]:
        """Find problems of the form's own fields; `jobs.job_templates` validates the job file and parameters."""
        problems = []
        if not self.name:
            problems.append(Problem("name", core_messages.gettext("Enter a name."), "required"))
        if len(self.name) > 120:
            problems.append(
                Problem("name", core_messages.gettext("At most 120 characters."), "too_long")
            )
        if self.visibility not in JobTemplate.Visibility.values:
            problems.append(
                Problem(
                    "visibility",
                    core_messages.gettext("Select who can see the template."),
                    "choice",
                )
            )
        return problems


def _build_parameter_row(parameter: Mapping[str, Any]) -> dict[str, Any]:
    default = parameter.get("default")
    default_text = (
        "" if default is None else json.dumps(default) if default in (True, False) else default
    )
    return {
        **parameter,
        "default": str(default_text),
        "required": "1" if parameter.get("required") else "",
        "choices": ", ".join(parameter.get("choices", ())),
    }


def _parse_parameter(row: Mapping[str, Any]) -> TemplateParameter:
    kind = row["kind"] if row["kind"] in PARAMETER_KINDS else "text"
    default: Any = row["default"] if str(row["default"]) != "" else None
    if kind in ("whole", "number") and isinstance(default, str):
        # Text that is not a number stays text, which `check_parameters` reports.
        with contextlib.suppress(ValueError):
            number = float(default)
            default = int(number) if number.is_integer() else number
    elif kind == "flag" and isinstance(default, str):
        default = {"true": True, "false": False}.get(default.strip().lower(), default)
    choices = [part.strip() for part in str(row["choices"]).split(",")]
    return TemplateParameter(
        name=str(row["name"]).strip(),
        title=str(row["title"]).strip()[:120],
        description=str(row["description"]).strip()[:1000],
        kind=kind,
        required=row["required"] == "1",
        default=default,
        choices=tuple(part for part in choices if part) if kind == "choice" else (),
    )


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def template_new(request: HttpRequest) -> HttpResponse:
    user = current_user(request)
    if request.method == "POST":
        form_data = TemplateFormData.from_request(request)
        try:
            with planning_slot(user):
                problems = form_data.check()
                if not problems:
                    created = job_templates.create_template(
                        by=user,
                        name=form_data.name,
                        document=job_templates.parse_template_text(form_data.text),
                        parameters=form_data.parameters(),
                        description=form_data.description,
                        visibility=form_data.visibility,
                        namespace=form_data.namespace or None,
                    )
                    messages.success(request, _("Template saved."))
                    return HttpResponseRedirect(reverse("template", args=[created.pk]))
        except SpecError as error:
            problems = list(error.problems)
        except ActionRefused as error:
            problems = [_build_problem(error)]
        return _render_editor(request, form_data, problems=problems)
    return _render_editor(request, _build_initial_form_data(request, user))


def _build_problem(error: ActionRefused) -> Problem:
    """Convert a refusal to a problem, which the form shows at the namespace's field if it is about the namespace."""
    path = "namespace" if "namespace" in (*error.params, error.params.get("field")) else ""
    return Problem(path, error.user_message, error.code)


def _build_initial_form_data(request: HttpRequest, user: User) -> TemplateFormData:
    """Fill the form with the job file of the job that the query parameter `job` names, else with the default one."""
    document: Mapping[str, Any] = build_default_document(request, user)
    name = ""
    if job_id := request.GET.get("job"):
        job = find_job_or_404(request, job_id)
        document, name = job_templates.build_document_from_job(job), job.name[:120]
    return TemplateFormData(name=name, text=dump_document(document, "yaml"))


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def template_edit(request: HttpRequest, template_id: uuid.UUID) -> HttpResponse:
    user = current_user(request)
    template = get_template_or_404(request, template_id)
    if request.method != "POST":
        return _render_editor(request, TemplateFormData.from_template(template), template=template)
    form_data = TemplateFormData.from_request(request)
    try:
        with planning_slot(user):
            problems = form_data.check()
            if not problems:
                job_templates.change_template(
                    template=template,
                    by=user,
                    version=form_data.version,
                    changes={
                        "name": form_data.name,
                        "description": form_data.description,
                        "visibility": form_data.visibility,
                        "namespace": form_data.namespace or None,
                        "document": job_templates.parse_template_text(form_data.text),
                        "parameters": form_data.parameters(),
                    },
                )
                messages.success(request, _("Template saved."))
                return HttpResponseRedirect(reverse("template", args=[template.pk]))
    except VersionConflict:
        return _render_conflict(request, form_data, get_template_or_404(request, template_id))
    except SpecError as error:
        problems = list(error.problems)
    except ActionRefused as error:
        problems = [_build_problem(error)]
    return _render_editor(request, form_data, template=template, problems=problems)


def _render_conflict(
    request: HttpRequest, form_data: TemplateFormData, current: JobTemplate
) -> HttpResponse:
    """Show the saved version beside the form, which keeps the user's values; saving them replaces the saved version."""
    saved_version = TemplateFormData.from_template(current)
    form_data.version = current.version
    return _render_editor(
        request, form_data, template=current, saved_version=saved_version, status=409
    )


def _render_editor(
    request: HttpRequest,
    form_data: TemplateFormData,
    *,
    template: JobTemplate | None = None,
    problems: Sequence[Problem] = (),
    saved_version: TemplateFormData | None = None,
    status: int = 200,
) -> HttpResponse:
    user = current_user(request)
    rows = _build_problem_rows(problems, form_data.text)
    context = {
        "form_data": form_data,
        "template": template,
        "saved_version": saved_version,
        "problems": rows,
        "problem_at": {row["path"]: row["message"] for row in rows},
        "may_change": template is None or job_templates.can_edit_template(user, template),
        "visibilities": JobTemplate.Visibility.choices,
        "visible_namespaces": namespaces_visible_to(user).order_by("name"),
        "kinds": KIND_LABELS.items(),
        "page": {
            "ace": list_ace_urls(),
            "check": reverse("template_check"),
            "schema": "/api/v1/job-file-schema",
            "problems": rows,
        },
    }
    response_status = 422 if rows and status == 200 else status
    return render(request, "templates/edit.html", context, status=response_status)


def _build_problem_rows(problems: Sequence[Problem], text: str) -> list[dict[str, Any]]:
    """Serialize problems. A problem without a line, because it was found after parsing, gets that of its path."""
    positions: Positions = {}
    if any(problem.line is None for problem in problems):
        with contextlib.suppress(SpecError):
            positions = parse_text(text).positions
    rows = [serialize_problem(problem) for problem in problems]
    for row in rows:
        row["line"] = row["line"] or find_line(row["path"], positions)
    return rows


@require_POST
def template_check(request: HttpRequest) -> HttpResponse:
    """Respond with the problems of the template in the form. The page sends it while a person edits the form.

    For the check, parameters without a default get placeholder values.
    """
    if not request.user.is_authenticated:
        return JsonResponse({"detail": _("Your session has ended.")}, status=401)
    form_data = TemplateFormData.from_request(request)
    try:
        with planning_slot(current_user(request)):
            document = job_templates.parse_template_text(form_data.text)
            used = sorted(find_parameter_names(document))
            parameters = form_data.parameters()
            check_parameters(parameters, document)
            placeholders = {parameter.name: parameter.sample_value() for parameter in parameters}
            load_document(fill_template(document, parameters, placeholders))
    except TooManyRequests as error:
        return respond_too_many(error)
    except SpecError as error:
        return JsonResponse({"problems": _build_problem_rows(error.problems, form_data.text)})
    return JsonResponse({"problems": [], "used": used})


# --- the form for parameter values ----------------------------------------------------------------------------------------------------


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def template_use(request: HttpRequest, template_id: uuid.UUID) -> HttpResponse:
    """Show the form for the values of the template's parameters.

    With the values, open the submit page or submit the job, as the pressed button requests.
    """
    template = get_template_or_404(request, template_id)
    parameters = job_templates.parameters_from_json(template.parameters)
    posted_values = {
        parameter.name: request.POST[f"p-{parameter.name}"]
        for parameter in parameters
        if f"p-{parameter.name}" in request.POST
    }
    problems: list[Problem] = []
    if request.method == "POST":
        try:
            values = _select_filled_values(parameters, posted_values)
            with planning_slot(current_user(request)):
                return _submit_or_open_submit_page(request, template, values)
        except (SpecError, PlanError) as error:
            problems = list(error.problems)
        except ActionRefused as error:
            problems = [Problem("", error.user_message, error.code)]
        except ClusterError as error:
            problems = [Problem("", error.user_message, "cluster")]
    context = {
        "template": template,
        "fields": _build_parameter_fields(parameters, posted_values, problems),
        "problems": [
            serialize_problem(p) for p in problems if not p.path.startswith("parameters.")
        ],
        "namespaces": namespaces_submittable_by(current_user(request)).order_by("name"),
        "namespace": request.POST.get("namespace", ""),
        "name": request.POST.get("name", ""),
        "key": request.POST.get("key") or uuid.uuid4().hex,
        "job_file": dump_document(template.spec, "yaml"),
        "job_fields": {field["name"]: field for field in describe_form()["job"]["basics"]},
        "may_change": job_templates.can_edit_template(current_user(request), template),
    }
    return render(request, "templates/use.html", context, status=422 if problems else 200)


def _select_filled_values(
    parameters: Sequence[TemplateParameter], posted_values: Mapping[str, str]
) -> dict[str, Any]:
    """Return the values of the form without empty ones. Only a parameter of kind text may have an empty value."""
    return {
        parameter.name: value
        for parameter in parameters
        if (value := posted_values.get(parameter.name)) is not None
        and (value != "" or parameter.kind == "text")
    }


def _submit_or_open_submit_page(
    request: HttpRequest, template: JobTemplate, values: dict[str, Any]
) -> HttpResponse:
    user = current_user(request)
    name, namespace = request.POST.get("name", "").strip(), request.POST.get("namespace", "")
    if request.POST.get("action") == "form":
        parameters = job_templates.parameters_from_json(template.parameters)
        document = to_document(load_document(fill_template(template.spec, parameters, values)).spec)
        document |= {"jobName": name} if name else {}
        document |= {"namespace": namespace} if namespace else {}
        return render_submit(request, document, origin=template.name)

    def prepare() -> Callable[[], Sequence[Job]]:
        submitter = Submitter(user)
        submission = job_templates.build_submission(
            template=template, submitter=submitter, values=values, name=name, namespace=namespace
        )
        return prepare_submission(submitter, submission)

    key = f"page-{request.POST.get('key', '')[:64]}"
    (job_id,), _replayed = create_once(
        by=user,
        key=key,
        fingerprint=lambda: compute_fingerprint(
            "template", template.pk, template.version, values, name, namespace
        ),
        prepare=prepare,
    )
    messages.success(request, _("Job submitted."))
    return HttpResponseRedirect(reverse("job", args=[job_id]))


def _build_parameter_fields(
    parameters: Sequence[TemplateParameter],
    posted_values: Mapping[str, str],
    problems: Sequence[Problem],
) -> list[dict[str, Any]]:
    message_by_path = {problem.path: format_problem(problem) for problem in problems}
    rows = []
    for parameter in parameters:
        default = _build_parameter_row(parameter.to_json())["default"]
        rows.append(
            {
                "name": parameter.name,
                "title": parameter.title or parameter.name,
                "description": parameter.description,
                "kind": parameter.kind,
                "required": parameter.required,
                "choices": parameter.choices,
                "value": posted_values.get(parameter.name, default),
                "problem": message_by_path.get(f"parameters.{parameter.name}", ""),
            }
        )
    return rows
