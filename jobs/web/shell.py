"""What every page has: the navigation, the namespace that a person is looking at, breadcrumbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.functional import Promise, SimpleLazyObject
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from clusters.access import namespaces_visible_to
from clusters.models import Namespace

if TYPE_CHECKING:
    from gateway.models import User

SESSION_KEY = "namespace"


@dataclass(frozen=True, slots=True)
class NavItem:
    """One entry at the side. `sections` are the address names below which it is lit."""

    address: str
    label: str | Promise
    icon: str
    sections: tuple[str, ...]
    staff_only: bool = False


NAVIGATION = (
    NavItem("home", _("Home"), "home", ("home",)),
    NavItem("jobs", _("Jobs"), "list-details", ("jobs", "job")),
    NavItem("submit", _("Submit a job"), "square-plus", ("submit",)),
    NavItem(
        "templates",
        _("Templates"),
        "template",
        ("templates", "template", "template_new", "template_use"),
    ),
)


def navigation(request: HttpRequest) -> list[dict[str, Any]]:
    match = request.resolver_match
    here = match.url_name if match and match.url_name else ""
    return [
        {
            "name": item.address,
            "url": reverse(item.address),
            "label": item.label,
            "icon": item.icon,
            "current": here in item.sections,
            "staff_only": item.staff_only,
        }
        for item in NAVIGATION
        if request.user.is_staff or not item.staff_only
    ]


def current_namespace(request: HttpRequest) -> Namespace | None:
    """The namespace chosen at the top; None: all that the person may see."""
    chosen = request.session.get(SESSION_KEY)
    if not chosen:
        return None
    return namespaces_visible_to(request.user).filter(pk=chosen).first()


def shell(request: HttpRequest) -> dict[str, Any]:
    """Context processor: evaluated only by pages that show the shell."""
    user: User | Any = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    return {
        "navigation": SimpleLazyObject(lambda: navigation(request)),
        "all_namespaces": SimpleLazyObject(
            lambda: list(namespaces_visible_to(user).order_by("name"))
        ),
        "current_namespace": SimpleLazyObject(lambda: current_namespace(request)),
    }


@require_POST
def choose_namespace(request: HttpRequest) -> HttpResponse:
    chosen = request.POST.get("namespace", "")
    if chosen.isdecimal() and namespaces_visible_to(request.user).filter(pk=chosen).exists():
        request.session[SESSION_KEY] = int(chosen)
    else:
        request.session.pop(SESSION_KEY, None)
    back = request.POST.get("next", "")
    safe = url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()})
    return HttpResponseRedirect(back if safe else reverse("home"))
