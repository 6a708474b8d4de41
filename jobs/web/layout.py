"""The layout of every page: navigation, selected namespace, and redirects to the previous page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.functional import Promise, SimpleLazyObject
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_POST

from clusters.access import namespaces_administered_by, namespaces_visible_to
from clusters.models import Namespace

if TYPE_CHECKING:
    from accounts.models import User

NAMESPACE_SESSION_KEY = "namespace"


@dataclass(frozen=True, slots=True)
class NavItem:
    """One entry of the navigation. It is marked as current on the pages whose URL names are in `page_names`."""

    url_name: str
    label: str | Promise
    icon: str
    page_names: tuple[str, ...]
    group: str = ""  # "administration": shown only to staff and to administrators of a namespace
    staff_only: bool = False


NAVIGATION = (
    NavItem("home", _("Home"), "home", ("home",)),
    NavItem("submit", _("Submit a job"), "square-plus", ("submit",)),
    NavItem("jobs", _("Jobs"), "list-details", ("jobs", "job")),
    NavItem(
        "templates",
        _("Templates"),
        "template",
        ("templates", "template", "template_new", "template_use"),
    ),
    NavItem("capacity", _("Capacity"), "chart-bar", ("capacity",)),
    NavItem("clusters", _("Clusters"), "server-2", ("clusters", "cluster"), "administration", True),
    NavItem(
        "namespaces",
        _("Namespaces"),
        "stack-2",
        ("namespaces", "namespace", "namespace_new"),
        "administration",
    ),
    NavItem("audit", _("Audit"), "history", ("audit",), "administration"),
)


def is_staff(user: Any) -> bool:
    """Return whether the user may see the pages of clusters."""
    return bool(user.is_active and (user.is_staff or user.is_superuser))


def administers_any_namespace(user: Any) -> bool:
    return is_staff(user) or namespaces_administered_by(user).exists()


def build_navigation(request: HttpRequest) -> list[dict[str, Any]]:
    match = request.resolver_match
    current_url_name = match.url_name if match and match.url_name else ""
    user_is_staff = is_staff(request.user)
    is_administrator = administers_any_namespace(request.user)
    return [
        {
            "name": item.url_name,
            "url": reverse(item.url_name),
            "label": item.label,
            "icon": item.icon,
            "current": current_url_name in item.page_names,
            "group": item.group,
        }
        for item in NAVIGATION
        if (user_is_staff or not item.staff_only) and (is_administrator or not item.group)
    ]


def get_current_namespace(request: HttpRequest) -> Namespace | None:
    """Return the namespace selected in the header; None if all namespaces of the user are selected."""
    namespace_id = request.session.get(NAMESPACE_SESSION_KEY)
    if not namespace_id:
        return None
    return namespaces_visible_to(request.user).filter(pk=namespace_id).first()


def layout_context(request: HttpRequest) -> dict[str, Any]:
    """Return the variables of the layout for every template (a context processor).

    They are lazy, so that a template that does not use them causes no queries.
    """
    user: User | Any = getattr(request, "user", None)
    if user is None or not user.is_authenticated:
        return {}
    return {
        "navigation": SimpleLazyObject(lambda: build_navigation(request)),
        "all_namespaces": SimpleLazyObject(
            lambda: list(namespaces_visible_to(user).order_by("name"))
        ),
        "current_namespace": SimpleLazyObject(lambda: get_current_namespace(request)),
    }


def redirect_back(request: HttpRequest, default: str) -> HttpResponseRedirect:
    """Redirect to the form's `next` if it is a URL of this site, else to `default`."""
    next_url = request.POST.get("next", "")
    is_safe = url_has_allowed_host_and_scheme(
        next_url, allowed_hosts={request.get_host()}, require_https=request.is_secure()
    )
    return HttpResponseRedirect(next_url if is_safe else default)


@require_POST
@login_required
def choose_namespace(request: HttpRequest) -> HttpResponse:
    namespace_id = request.POST.get("namespace", "")
    # Ids are below 2**63, which has 19 digits. A larger number would raise OverflowError in the query.
    is_valid_id = namespace_id.isascii() and namespace_id.isdecimal() and len(namespace_id) < 19
    if is_valid_id and namespaces_visible_to(request.user).filter(pk=namespace_id).exists():
        request.session[NAMESPACE_SESSION_KEY] = int(namespace_id)
    else:
        request.session.pop(NAMESPACE_SESSION_KEY, None)
    return redirect_back(request, reverse("home"))
