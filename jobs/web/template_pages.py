"""Templates: the list, the editor with its parameters, and using one.

Plain forms that work without script; the editor is put over the text field. Rules are `jobs.job_templates`'.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, pgettext_lazy
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from clusters.access import namespaces_open_to, namespaces_visible_to
from clusters.errors import ClusterError
from core import messages as sentences
from core.api.idempotency import fingerprint_of
from core.errors import JobError, VersionConflict
from core.translation import told
from jobs import job_templates
from jobs.actions import create_job_once
from jobs.jobfile import Problem, SpecError, dump_document, to_document
from jobs.jobfile.errors import path_text
from jobs.jobfile.importers import load_document
from jobs.jobfile.parameters import KINDS, Parameter, check_parameters, fill, used_names
from jobs.jobfile.parse import parse_text
from jobs.models import Job, JobTemplate
from jobs.plan import PlanError
from jobs.presentation import problem_row, problem_words
from jobs.store.access import visible_to
from jobs.submission import submit
from jobs.web.submit_page import ACE_FILES, default_document, find_or_404, render_submit

if TYPE_CHECKING:
    from accounts.models import User

PER_PAGE = 50
MAX_CHOSEN = 500
SCOPES = ("mine", "namespace", "public", "all")
KIND_WORDS = {
    "text": pgettext_lazy("kind of value", "text"),
    "whole": pgettext_lazy("kind of value", "whole number"),
    "number": pgettext_lazy("kind of value", "number"),
    "flag": pgettext_lazy("kind of value", "yes or no"),
    "choice": pgettext_lazy("kind of value", "choice"),
}


def person(request: HttpRequest) -> User:
    return cast("User", request.user)


# --- the list -------------------------------------------------------------------------------------------


@require_GET
@login_required
def template_list(request: HttpRequest) -> HttpResponse:
    user = person(request)
    scope = request.GET.get("scope", "all")
    scope = scope if scope in SCOPES else "all"
    words = request.GET.get("q", "")[:200]
    rows = job_templates.templates_visible_to(user).select_related("owner", "namespace")
    if scope == "mine":
        rows = rows.filter(owner=user)
    elif scope in ("namespace", "public"):
        rows = rows.filter(visibility=scope)
    for word in words.split():
        rows = rows.filter(
            Q(name__icontains=word)
            | Q(description__icontains=word)
            | Q(owner__username__icontains=word)
        )
    page = Paginator(rows.order_by("-updated_at", "-id"), PER_PAGE).get_page(
        request.GET.get("page")
    )
    for row in page.object_list:
        row.may_change = job_templates.can_change(user, row)  # type: ignore[attr-defined]
    context = {
        "page": page,
        "scope": scope,
        "words": words,
        "scopes": [
            ("all", _("All")),
            ("mine", _("Mine")),
            ("namespace", _("Of my namespaces")),
            ("public", _("Public")),
        ],
    }
    return render(request, "templates/list.html", context)


@require_POST
@login_required
def template_copy(request: HttpRequest, template_id: uuid.UUID) -> HttpResponse:
    template = find_or_404(request, template_id)
    copy = job_templates.copy_template(template=template, by=person(request))
    messages.success(request, _("This is your copy. Only you see it."))
    return HttpResponseRedirect(reverse("template", args=[copy.pk]))


@require_POST
@login_required
def delete_several(request: HttpRequest) -> HttpResponse:
    """One or many; those that may not be deleted are named, the others go."""
    user = person(request)
    ids = []
    for text in request.POST.getlist("id")[:MAX_CHOSEN]:
        try:
            ids.append(uuid.UUID(text))
        except ValueError:
            continue
    done = 0
    for template in (
        job_templates.templates_visible_to(user).select_related("namespace").filter(pk__in=ids)
    ):
        try:
            job_templates.delete_template(template=template, by=user)
            done += 1
        except JobError as problem:
            messages.error(request, f"{template.name}: {told(problem.user_message)}")
    if done:
        text = ngettext("%(count)s template deleted.", "%(count)s templates deleted.", done)
        messages.success(request, text % {"count": done})
    return HttpResponseRedirect(reverse("templates"))


# --- the editor ------------------------------------------------------------------------------------------


@dataclass
class Typed:
    """A template as it stands in the form, right or wrong."""

    name: str = ""
    description: str = ""
    visibility: str = JobTemplate.Visibility.PRIVATE
    namespace: str = ""
    text: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    version: int = 0

    @classmethod
    def of_template(cls, template: JobTemplate) -> Typed:
        return cls(
            name=template.name,
            description=template.description,
            visibility=template.visibility,
            namespace=template.namespace.name if template.namespace else "",
            text=dump_document(template.spec, "yaml"),
            rows=[_row(parameter) for parameter in template.parameters],
            version=template.version,
        )

    @classmethod
    def of_request(cls, request: HttpRequest) -> Typed:
        given = request.POST
        names = ("name", "title", "description", "kind", "required", "default", "choices")
        columns = [given.getlist(f"parameter_{name}") for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=False)]
        version = given.get("version", "")
        return cls(
            name=given.get("name", "").strip(),
            description=given.get("description", "").strip(),
            visibility=given.get("visibility", ""),
            namespace=given.get("namespace", ""),
            text=given.get("job_file", "").replace("\r\n", "\n"),
            rows=[row for row in rows if any(str(row[name]).strip() for name in names[:3])],
            version=int(version) if version.isdecimal() else 0,
        )

    def parameters(self) -> list[Parameter]:
        return [_parameter(row) for row in self.rows]

    def check(self) -> list[Problem]:
        """What the services leave to the form."""
        found = []
        if not self.name:
            found.append(Problem("name", sentences.gettext("A template needs a name."), "required"))
        if len(self.name) > 120:
            found.append(Problem("name", sentences.gettext("At most 120 characters."), "too_long"))
        if self.visibility not in JobTemplate.Visibility.values:
            found.append(
                Problem("visibility", sentences.gettext("Choose who may see it."), "choice")
            )
        return found


def _row(parameter: Mapping[str, Any]) -> dict[str, Any]:
    default = parameter.get("default")
    shown = "" if default is None else json.dumps(default) if default in (True, False) else default
    return {
        **parameter,
        "default": str(shown),
        "required": "1" if parameter.get("required") else "",
        "choices": ", ".join(parameter.get("choices", ())),
    }


def _parameter(row: Mapping[str, Any]) -> Parameter:
    kind = row["kind"] if row["kind"] in KINDS else "text"
    default: Any = row["default"] if str(row["default"]) != "" else None
    if kind in ("whole", "number") and isinstance(default, str):
        # What is no number stays text: the check says so, with its row.
        with contextlib.suppress(ValueError):
            default = float(default)
            default = int(default) if default.is_integer() else default
    elif kind == "flag" and isinstance(default, str):
        default = {"true": True, "false": False}.get(default.strip().lower(), default)
    choices = [part.strip() for part in str(row["choices"]).split(",")]
    return Parameter(
        name=str(row["name"]).strip(),
        title=str(row["title"]).strip()[:120],
        description=str(row["description"]).strip()[:1000],
        kind=kind,
        required=row["required"] == "1",
        default=default,
        choices=tuple(part for part in choices if part) if kind == "choice" else (),
    )


@require_http_methods(["GET", "POST"])
@login_required
def template_new(request: HttpRequest) -> HttpResponse:
    user = person(request)
    if request.method == "POST":
        typed = Typed.of_request(request)
        problems = typed.check()
        try:
            if not problems:
                made = job_templates.create_template(
                    by=user,
                    name=typed.name,
                    document=job_templates.document_of_text(typed.text),
                    parameters=typed.parameters(),
                    description=typed.description,
                    visibility=typed.visibility,
                    namespace=typed.namespace or None,
                )
                messages.success(request, _("The template is saved."))
                return HttpResponseRedirect(reverse("template", args=[made.pk]))
        except SpecError as error:
            problems = list(error.problems)
        except JobError as error:
            problems = [_refusal(error)]
        return _editor(request, typed, problems=problems)
    return _editor(request, _new_from(request, user))


def _refusal(error: JobError) -> Problem:
    path = "namespace" if "namespace" in (*error.params, error.params.get("field")) else ""
    return Problem(path, error.user_message, error.code)


def _new_from(request: HttpRequest, user: User) -> Typed:
    """A job's file, when one is named; otherwise the default job's."""
    document: Mapping[str, Any] = default_document(request, user)
    name = ""
    if job_id := request.GET.get("job"):
        job = _visible_job(user, job_id)
        document, name = job_templates.document_of_job(job), job.name[:120]
    return Typed(name=name, text=dump_document(document, "yaml"))


def _visible_job(user: User, job_id: str) -> Job:
    try:
        job = visible_to(user).filter(pk=uuid.UUID(job_id)).first()
    except ValueError as problem:
        raise Http404 from problem
    if job is None:
        raise Http404
    return job


@require_http_methods(["GET", "POST"])
@login_required
def template_edit(request: HttpRequest, template_id: uuid.UUID) -> HttpResponse:
    user = person(request)
    template = find_or_404(request, template_id)
    if request.method == "GET":
        return _editor(request, Typed.of_template(template), template=template)
    typed = Typed.of_request(request)
    problems = typed.check()
    try:
        if not problems:
            job_templates.change_template(
                template=template,
                by=user,
                version=typed.version,
                changes={
                    "name": typed.name,
                    "description": typed.description,
                    "visibility": typed.visibility,
                    "namespace": typed.namespace or None,
                    "document": job_templates.document_of_text(typed.text),
                    "parameters": typed.parameters(),
                },
            )
            messages.success(request, _("The template is saved."))
            return HttpResponseRedirect(reverse("template", args=[template.pk]))
    except VersionConflict:
        return _conflict(request, typed, find_or_404(request, template_id))
    except SpecError as error:
        problems = list(error.problems)
    except JobError as error:
        problems = [_refusal(error)]
    return _editor(request, typed, template=template, problems=problems)


def _conflict(request: HttpRequest, typed: Typed, current: JobTemplate) -> HttpResponse:
    """Both versions are shown; what was typed stays in the form and can be saved over the other."""
    theirs = Typed.of_template(current)
    typed.version = current.version
    return _editor(request, typed, template=current, theirs=theirs, status=409)


def _editor(
    request: HttpRequest,
    typed: Typed,
    *,
    template: JobTemplate | None = None,
    problems: Sequence[Problem] = (),
    theirs: Typed | None = None,
    status: int = 200,
) -> HttpResponse:
    user = person(request)
    rows = [problem_row(problem) for problem in problems]
    lines = _lines(typed.text)
    for row in rows:
        row["line"] = row["line"] or lines.get(row["path"])
    context = {
        "typed": typed,
        "template": template,
        "theirs": theirs,
        "problems": rows,
        "problem_at": {row["path"]: row["message"] for row in rows},
        "may_change": template is None or job_templates.can_change(user, template),
        "visibilities": JobTemplate.Visibility.choices,
        "own_namespaces": namespaces_visible_to(user).order_by("name"),
        "kinds": KIND_WORDS.items(),
        "page": {
            "ace": [static(f"vendor/ace/{name}") for name in ACE_FILES],
            "check": reverse("template_check"),
            "schema": "/api/v1/job-file-schema",
            "problems": rows,
        },
    }
    bad = 422 if rows and status == 200 else status
    return render(request, "templates/edit.html", context, status=bad)


def _lines(text: str) -> dict[str, int]:
    try:
        positions = parse_text(text).positions
    except SpecError:
        return {}
    return {path_text(loc): position.line for loc, position in positions.items()}


@require_POST
def template_check(request: HttpRequest) -> HttpResponse:
    """What is wrong with a template's job file, with stand-ins for its parameters, while it is typed."""
    if not request.user.is_authenticated:
        return JsonResponse({"detail": _("Your session has ended.")}, status=401)
    typed = Typed.of_request(request)
    try:
        document = job_templates.document_of_text(typed.text)
        used = sorted(used_names(document))
        parameters = typed.parameters()
        check_parameters(parameters, document)
        stand_ins = {parameter.name: parameter.stand_in() for parameter in parameters}
        load_document(fill(document, parameters, stand_ins))
    except SpecError as error:
        lines = _lines(typed.text)
        rows = [problem_row(problem) for problem in error.problems]
        for row in rows:
            row["line"] = row["line"] or lines.get(row["path"])
        return JsonResponse({"problems": rows})
    return JsonResponse({"problems": [], "used": used})


# --- use ----------------------------------------------------------------------------------------------------


@require_http_methods(["GET", "POST"])
@login_required
def template_use(request: HttpRequest, template_id: uuid.UUID) -> HttpResponse:
    """Asks for the parameters; then the submit page opens filled in, or the job goes at once."""
    template = find_or_404(request, template_id)
    parameters = job_templates.parameters_from_json(template.parameters)
    given = {
        parameter.name: request.POST[f"p-{parameter.name}"]
        for parameter in parameters
        if f"p-{parameter.name}" in request.POST
    }
    problems: list[Problem] = []
    if request.method == "POST":
        try:
            return _used(request, template, _answers(parameters, given))
        except (SpecError, PlanError) as error:
            problems = list(error.problems)
        except JobError as error:
            problems = [Problem("", error.user_message, error.code)]
        except ClusterError as error:
            problems = [Problem("", error.user_message, "cluster")]
    context = {
        "template": template,
        "fields": _fields(parameters, given, problems),
        "problems": [problem_row(p) for p in problems if not p.path.startswith("parameters.")],
        "namespaces": namespaces_open_to(person(request)).order_by("name"),
        "namespace": request.POST.get("namespace", ""),
        "name": request.POST.get("name", ""),
        "key": request.POST.get("key") or uuid.uuid4().hex,
        "job_file": dump_document(template.spec, "yaml"),
        "may_change": job_templates.can_change(person(request), template),
    }
    return render(request, "templates/use.html", context, status=422 if problems else 200)


def _answers(parameters: Sequence[Parameter], given: Mapping[str, str]) -> dict[str, Any]:
    """An empty field of a number or choice means: not given."""
    return {
        parameter.name: given[parameter.name]
        for parameter in parameters
        if parameter.name in given and (given[parameter.name] != "" or parameter.kind == "text")
    }


def _used(request: HttpRequest, template: JobTemplate, values: dict[str, Any]) -> HttpResponse:
    user = person(request)
    name, namespace = request.POST.get("name", "").strip(), request.POST.get("namespace", "")
    if request.POST.get("action") == "form":
        parameters = job_templates.parameters_from_json(template.parameters)
        document = to_document(load_document(fill(template.spec, parameters, values)).spec)
        document |= {"jobName": name} if name else {}
        document |= {"namespace": namespace} if namespace else {}
        return render_submit(request, document, origin=template.name)

    def create() -> Job:
        return submit(
            by=user,
            submission=job_templates.submission_from(
                template=template, by=user, values=values, name=name, namespace=namespace
            ),
        )

    key = f"page-{request.POST.get('key', '')[:64]}"
    job, _again = create_job_once(
        by=user,
        key=key,
        fingerprint=fingerprint_of(
            "template", template.pk, template.version, values, name, namespace
        ),
        create=create,
    )
    messages.success(request, _("The job is submitted."))
    return HttpResponseRedirect(reverse("job", args=[job.pk]))


def _fields(
    parameters: Sequence[Parameter], given: Mapping[str, str], problems: Sequence[Problem]
) -> list[dict[str, Any]]:
    wrong = {problem.path: problem_words(problem) for problem in problems}
    rows = []
    for parameter in parameters:
        default = _row(parameter.to_json())["default"]
        rows.append(
            {
                "name": parameter.name,
                "title": parameter.title or parameter.name,
                "description": parameter.description,
                "kind": parameter.kind,
                "required": parameter.required,
                "choices": parameter.choices,
                "value": given.get(parameter.name, default),
                "problem": wrong.get(f"parameters.{parameter.name}", ""),
            }
        )
    return rows
