"""`/api/v1/tokens`: a person's own API tokens. A token cannot create tokens; a session or the password can."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any, TypedDict

from django.conf import settings
from django.utils import timezone
from django.utils.translation import gettext as _
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.authentication import BasicAuthentication
from rest_framework.exceptions import APIException, NotFound, PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accounts.models import ApiToken
from accounts.requests import authenticated_user
from accounts.sign_in_limits import limit_password_check
from accounts.tokens import (
    MAX_TOKENS_PER_PERSON,
    HeaderCsrfSessionAuthentication,
    TokenAuthentication,
    create_token,
    has_max_tokens,
    revoke_token,
)
from core.api.fields import StrictCharField, StrictSerializer
from core.api.schema import problem_responses
from core.api.shapes import (
    Choices,
    Help,
    Timestamp,
    format_optional_timestamp,
    format_timestamp,
    serializer_of,
)


class TokenAnswerShape(TypedDict):
    id: int
    name: str
    prefix: Annotated[str, Help("First characters of the secret, to distinguish tokens.")]
    scope: Annotated[str, Choices(ApiToken.Scope.choices)]
    created_at: Timestamp
    expires_at: Timestamp
    last_used_at: Timestamp | None
    is_current: Annotated[bool, Help("This request was made with it.")]


class TokenListShape(TypedDict):
    items: list[TokenAnswerShape]


class NewTokenAnswerShape(TokenAnswerShape):
    token: Annotated[str, Help("The secret. Shown this once.")]


class NewTokenSerializer(StrictSerializer):
    name = StrictCharField(max_length=100)
    scope = serializers.ChoiceField(choices=ApiToken.Scope.choices, default=ApiToken.Scope.READ)
    expires_at = serializers.DateTimeField(
        required=False, help_text="Absent: as long as this server allows by default."
    )

    def validate_expires_at(self, value: datetime) -> datetime:
        now = timezone.now()
        if not now < value <= now + timedelta(days=settings.API_TOKEN_MAX_DAYS):
            raise serializers.ValidationError(
                _("must lie in the future, at most %(days)s days from now.")
                % {"days": settings.API_TOKEN_MAX_DAYS}
            )
        return value


class PasswordAuthentication(BasicAuthentication):
    """HTTP basic authentication with the limits of the sign-in page, for `sluice login`. Only `/api/v1/tokens` accepts it."""

    www_authenticate_realm = "sluice"

    def authenticate_credentials(
        self, userid: str, password: str, request: Request | None = None
    ) -> Any:
        if request is None:
            raise ValueError("A password check needs the request, whose address it counts.")
        with limit_password_check(request._request, userid) as check:
            result = super().authenticate_credentials(userid, password, request)
            check.password_was_right()  # a wrong one has raised AuthenticationFailed
        return result


def build_token_answer(token: ApiToken, request: Request) -> TokenAnswerShape:
    return {
        "id": token.pk,
        "name": token.name,
        "prefix": token.prefix,
        "scope": token.scope,
        "created_at": format_timestamp(token.created_at),
        "expires_at": format_timestamp(token.expires_at),
        "last_used_at": format_optional_timestamp(token.last_used_at),
        "is_current": isinstance(request.auth, ApiToken) and request.auth.pk == token.pk,
    }


class TokenListView(APIView):
    authentication_classes = [
        TokenAuthentication,
        HeaderCsrfSessionAuthentication,
        PasswordAuthentication,
    ]

    @extend_schema(
        operation_id="tokens_list",
        tags=["tokens"],
        summary="Your tokens",
        responses={200: serializer_of(TokenListShape), **problem_responses(401)},
    )
    def get(self, request: Request) -> Response:
        tokens = ApiToken.objects.filter(user=authenticated_user(request), revoked_at__isnull=True)
        return Response({"items": [build_token_answer(token, request) for token in tokens]})

    @extend_schema(
        operation_id="tokens_create",
        tags=["tokens"],
        summary="Make a token; its secret is in this answer only",
        request=NewTokenSerializer,
        responses={
            201: serializer_of(NewTokenAnswerShape),
            **problem_responses(400, 401, 403, 409, 413, 415),
        },
    )
    def post(self, request: Request) -> Response:
        if isinstance(request.auth, ApiToken):
            raise PermissionDenied(
                _("A token cannot make tokens. Sign in with your name and password."),
                code="sign_in_needed",
            )
        serializer = NewTokenSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        values = serializer.validated_data
        user = authenticated_user(request)
        if has_max_tokens(user=user):
            raise TooManyTokens(
                _("You have %(count)s tokens. Revoke one that is no longer used.")
                % {"count": MAX_TOKENS_PER_PERSON}
            )
        expires_at = values.get("expires_at") or timezone.now() + timedelta(
            days=settings.API_TOKEN_DEFAULT_DAYS
        )
        token, secret = create_token(
            user=user, name=values["name"], scope=values["scope"], expires_at=expires_at
        )
        body: NewTokenAnswerShape = {**build_token_answer(token, request), "token": secret}
        return Response(body, status=status.HTTP_201_CREATED)


class TooManyTokens(APIException):
    status_code = 409
    default_code = "too_many_tokens"


class TokenView(APIView):
    @extend_schema(
        operation_id="tokens_revoke",
        tags=["tokens"],
        summary="Revoke a token at once",
        responses={204: None, **problem_responses(401, 403, 404)},
    )
    def delete(self, request: Request, id: int) -> Response:
        # A read-only token may revoke itself, but no other token.
        auth_token = request.auth
        if (
            isinstance(auth_token, ApiToken)
            and auth_token.scope == ApiToken.Scope.READ
            and auth_token.pk != id
        ):
            raise PermissionDenied(
                _("This token may only read, and revoke itself. Use one with the scope “write”."),
                code="token_read_only",
            )
        token = ApiToken.objects.filter(
            user=authenticated_user(request), pk=id, revoked_at__isnull=True
        ).first()
        if token is None:
            raise NotFound(_("You have no such token."))
        revoke_token(token=token)
        return Response(status=status.HTTP_204_NO_CONTENT)

    reading_methods = ("DELETE",)
