"""The list of jobs: filters kept in the address, pages by key, rows that renew themselves."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST
from rest_framework.exceptions import ValidationError

from clusters.access import Role
from jobs import services
from jobs.access import visible_to
from jobs.api import shapes
from jobs.api.filters import read_job_list
from jobs.api.pagination import decode_cursor, encode_cursor, fingerprint
from jobs.listing import JobFilter, page_of_jobs
from jobs.states import JobState
from jobs.web.shell import current_namespace

if TYPE_CHECKING:
    from gateway.models import User

SCOPES = ("mine", "namespace", "all")
KINDS = {"single": False, "distributed": True}
MAX_ROWS_AT_ONCE = 200
# Address parameters of the page itself; the rest are the API's filters, by the same names.
OWN_PARAMETERS = ("scope", "kind", "cursor")


def job_shapes(request: HttpRequest, wanted: JobFilter, **page: Any) -> tuple[list[Any], Any]:
    """Rows as the API shows them, and the key of the next page."""
    found = page_of_jobs(request.user, wanted, **page)
    now = timezone.now()
    user = cast("User", request.user)
    jobs = [
        shapes.job(row, user, Role.ADMIN if user.is_superuser else found.roles.get(row[4]), now)
        for row in found.rows
    ]
    return jobs, found.next_key


def asked_filter(request: HttpRequest) -> tuple[JobFilter, str, list[str]]:
    """The filter of the address, the scope, and sentences about what was wrong with it."""
    given = request.GET.copy()
    for name in OWN_PARAMETERS:
        given.pop(name, None)
    for name in [name for name in given if not any(given.getlist(name))]:
        del given[name]
    problems: list[str] = []
    try:
        wanted = read_job_list(given).wanted
    except ValidationError as error:
        details = cast(dict[str, list[str]], error.detail)
        problems = [f"{name}: {words[0]}" for name, words in details.items()]
        wanted = JobFilter()
    scope = request.GET.get("scope", "mine")
    namespace = current_namespace(request)
    if scope == "mine":
        wanted = replace(wanted, mine=True)
    if namespace is not None and not wanted.namespaces:
        wanted = replace(wanted, namespaces=(namespace.name,))
    kind = request.GET.get("kind", "")
    if kind in KINDS:
        wanted = replace(wanted, distributed=KINDS[kind])
    return wanted, scope if scope in SCOPES else "mine", problems


@require_GET
@login_required
def job_list(request: HttpRequest) -> HttpResponse:
    wanted, scope, problems = asked_filter(request)
    query = fingerprint(request.user.pk, repr(wanted))
    after = None
    if cursor := request.GET.get("cursor"):
        try:
            after = decode_cursor(cursor, query)
        except ValidationError:
            problems.append(_("That page is no longer there. This is the first one."))
    jobs, next_key = job_shapes(request, wanted, after=after)
    filters = ("state", "owner", "gpu_type", "label", "created_after", "created_before")
    context = {
        "jobs": jobs,
        "scope": scope,
        "kind": request.GET.get("kind", ""),
        "sort": wanted.sort,
        "problems": problems,
        "states": [state.value for state in JobState],
        "chosen_states": wanted.states,
        "next_cursor": encode_cursor(next_key, query) if next_key else "",
        "first_page": after is None,
        "filtered": any(request.GET.get(name) for name in (*filters, "q")),
        "advanced": any(request.GET.get(name) for name in filters),
    }
    template = "jobs/list_body.html" if request.headers.get("HX-Request") else "jobs/list.html"
    return render(request, template, context)


@require_GET
@login_required
def job_rows(request: HttpRequest) -> HttpResponse:
    """Some rows anew, by id: what the page asks for when events told it so."""
    ids = []
    for text in request.GET.get("ids", "").split(",")[:MAX_ROWS_AT_ONCE]:
        try:
            ids.append(uuid.UUID(text))
        except ValueError:
            continue
    wanted = JobFilter(ids=tuple(ids))
    jobs = job_shapes(request, wanted, limit=MAX_ROWS_AT_ONCE)[0] if ids else []
    return render(request, "jobs/rows.html", {"jobs": jobs})


@require_POST
@login_required
def batch(request: HttpRequest) -> HttpResponse:
    """Stop or delete the chosen jobs; those that cannot be are named, the others are done."""
    ids = []
    for text in request.POST.getlist("id")[:MAX_ROWS_AT_ONCE]:
        try:
            ids.append(uuid.UUID(text))
        except ValueError:
            continue
    user = cast("User", request.user)
    jobs = list(visible_to(user).select_related("namespace", "owner").filter(pk__in=ids))
    deleting = request.POST.get("action") == "delete"
    if deleting:
        outcomes = services.batch_delete(
            jobs=jobs,
            by=user,
            remove_files=bool(request.POST.get("remove_files")),
        )
    else:
        outcomes = services.batch_stop(jobs=jobs, by=user)
    done = sum(outcome.ok for outcome in outcomes)
    if done:
        text = (
            ngettext("%(count)s job deleted.", "%(count)s jobs deleted.", done)
            if deleting
            else ngettext(
                "%(count)s job is being stopped.", "%(count)s jobs are being stopped.", done
            )
        )
        messages.success(request, text % {"count": done})
    for outcome in [o for o in outcomes if not o.ok][:5]:
        messages.error(request, outcome.message)
    back = request.POST.get("next", "")
    safe = url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()})
    return HttpResponseRedirect(back if safe else reverse("jobs"))
