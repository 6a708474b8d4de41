"""The view that nginx asks before it receives a large request body (`gateway.front`)."""

from __future__ import annotations

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.views import APIView


class AuthenticateView(APIView):
    """204 if the request has a valid session or token, else 401. Reveals nothing else."""

    @extend_schema(exclude=True)
    def get(self, request: Request) -> HttpResponse:
        return HttpResponse(status=204)
