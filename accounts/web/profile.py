"""A person's own pages: profile, password, API tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.contrib.auth.forms import PasswordChangeForm
from django.contrib.auth.views import PasswordChangeView
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.urls import reverse, reverse_lazy
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods, require_POST

from accounts.models import ApiToken, User
from accounts.sign_in_limits import limit_own_password_check
from accounts.tokens import create_token, has_max_tokens, revoke_token, revoke_user_tokens
from accounts.web.sign_in import set_saved_preference_cookies
from core.errors import TooManyRequests
from core.translation import translate

if TYPE_CHECKING:
    UserModelForm = forms.ModelForm[User]
else:
    UserModelForm = forms.ModelForm

_profile_context_functions: list[Callable[[User], dict[str, Any]]] = []


def add_profile_context(get_context: Callable[[User], dict[str, Any]]) -> None:
    """Register a function that returns template context for a user's profile page. For apps that import this one."""
    _profile_context_functions.append(get_context)


TOKEN_LIFETIMES_DAYS = (7, 30, 90, 180, 366)
WIDGET_CSS_CLASSES = ((forms.Select, "form-select"), (forms.CheckboxInput, "form-check-input"))


def add_form_css_classes(form: forms.BaseForm) -> None:
    """Add CSS classes to the form's fields, and mark fields with errors as invalid for screen readers."""
    for name, field in form.fields.items():
        field.widget.attrs["class"] = next(
            (css for widget, css in WIDGET_CSS_CLASSES if isinstance(field.widget, widget)),
            "form-control",
        )
        if form.is_bound and name in form.errors:
            field.widget.attrs["class"] += " is-invalid"
            field.widget.attrs["aria-invalid"] = "true"


class ProfileForm(UserModelForm):
    class Meta:
        model = User
        fields = ["first_name", "last_name", "email", "language", "theme"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["language"].choices = [("", _("As the browser")), *settings.LANGUAGES]  # type: ignore[attr-defined]
        add_form_css_classes(self)


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def profile_page(request: HttpRequest) -> HttpResponse:
    user = cast("User", request.user)
    form = ProfileForm(request.POST or None, instance=user)
    if request.method == "POST" and form.is_valid():
        form.save()
        messages.success(request, _("Your profile is saved."))
        response = HttpResponseRedirect(reverse("profile"))
        set_saved_preference_cookies(response, user)
        return response
    context: dict[str, Any] = {"form": form}
    for get_context in _profile_context_functions:
        context |= get_context(user)
    return render(request, "account/profile.html", context)


class NewPasswordForm(PasswordChangeForm):
    revoke_tokens = forms.BooleanField(
        label=gettext_lazy("Revoke my API tokens"),
        required=False,
        initial=True,
        help_text=gettext_lazy(
            "Somebody who knew the old password may have made one. Programs then need a new token."
        ),
    )


class ChangePasswordView(PasswordChangeView):
    form_class = NewPasswordForm
    template_name = "account/password.html"
    success_url = reverse_lazy("profile")

    def get_form(self, form_class: Any = None) -> Any:
        form = super().get_form(form_class)
        add_form_css_classes(form)
        return form

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            with limit_own_password_check(request, cast("User", request.user)) as check:
                form = self.get_form()
                is_valid = form.is_valid()
                if "old_password" not in form.errors:
                    check.password_was_right()
                return self.form_valid(form) if is_valid else self.form_invalid(form)
        except TooManyRequests as error:
            # A form without the posted values: it cannot be validated, which would check the password.
            form = self.form_class(cast("User", request.user))
            add_form_css_classes(form)
            context = self.get_context_data(form=form, refusal=translate(error.user_message))
            response = self.render_to_response(context, status=429)
            response["Retry-After"] = str(math.ceil(error.retry_after_s))
            return response

    def form_valid(self, form: Any) -> HttpResponse:
        messages.success(self.request, _("Your password is changed."))
        if form.cleaned_data["revoke_tokens"]:
            revoke_user_tokens(user=form.user)
        return super().form_valid(form)


class TokenForm(forms.Form):
    name = forms.CharField(label=gettext_lazy("Name"), max_length=100)
    scope = forms.ChoiceField(label=gettext_lazy("May"), choices=ApiToken.Scope.choices)
    days = forms.TypedChoiceField(label=gettext_lazy("Ends after"), coerce=int, empty_value=None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        lifetimes_days = sorted(
            {
                *(days for days in TOKEN_LIFETIMES_DAYS if days <= settings.API_TOKEN_MAX_DAYS),
                settings.API_TOKEN_DEFAULT_DAYS,
            }
        )
        field = cast("forms.TypedChoiceField", self.fields["days"])
        field.choices = [(days, _("%(days)s days") % {"days": days}) for days in lifetimes_days]
        field.initial = settings.API_TOKEN_DEFAULT_DAYS
        add_form_css_classes(self)


@require_http_methods(["GET", "HEAD", "POST"])
@sensitive_post_parameters()
@login_required
def tokens_page(request: HttpRequest) -> HttpResponse:
    """List the person's tokens; a POST also creates one, whose secret is only in this response."""
    user = cast("User", request.user)
    form = TokenForm(request.POST or None)
    secret = ""
    if request.method == "POST" and form.is_valid():
        if has_max_tokens(user=user):
            form.add_error(None, _("You have too many tokens. Revoke those you do not need."))
        else:
            _token, secret = create_token(
                user=user,
                name=form.cleaned_data["name"],
                scope=form.cleaned_data["scope"],
                expires_at=timezone.now() + timedelta(days=form.cleaned_data["days"]),
            )
            form = TokenForm()
    now = timezone.now()
    cutoff = now - timedelta(days=30)
    context = {
        "form": form,
        "secret": secret,
        "now": now,
        "tokens": ApiToken.objects.filter(user=user).filter(
            Q(revoked_at=None, expires_at__gt=cutoff) | Q(revoked_at__gt=cutoff)
        ),
        "server": request.build_absolute_uri("/").rstrip("/"),
    }
    return render(request, "account/tokens.html", context)


@require_POST
@login_required
def revoke_token_view(request: HttpRequest, token_id: int) -> HttpResponse:
    token = get_object_or_404(ApiToken, pk=token_id, user=cast("User", request.user))
    revoke_token(token=token)
    messages.success(request, _("The token “%(name)s” no longer works.") % {"name": token.name})
    return HttpResponseRedirect(reverse("tokens"))
