"""CompiledLookup returns the same instances as the ORM."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models import Model
from django.utils import timezone

from accounts.models import ApiToken
from accounts.tokens import create_token
from clusters.models import Namespace
from core.lookup import CompiledLookup
from tests.app.scenario import Scenario

pytestmark = pytest.mark.django_db


def column_values(row: Model) -> dict[str, object]:
    return {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields}


def test_columns_match_orm_including_related_row(scenario: Scenario) -> None:
    Namespace.objects.filter(pk=scenario.lab.pk).update(
        partitions=["cpu", "gpu"], description="实验室"
    )
    expected = Namespace.objects.select_related("cluster").get(name="lab")
    found = CompiledLookup(Namespace, ("name",), related="cluster").first("lab")
    assert found is not None
    assert column_values(found) == column_values(expected)
    assert "cluster" in found._state.fields_cache
    assert column_values(found.cluster) == column_values(expected.cluster)


def test_lookup_by_several_columns_with_datetimes(scenario: Scenario) -> None:
    token, _secret = create_token(
        user=scenario.alice, name="t", scope="read", expires_at=timezone.now() + timedelta(days=1)
    )
    found = CompiledLookup(ApiToken, ("user_id", "name"), related="user").first(
        scenario.alice.pk, "t"
    )
    assert found is not None
    assert column_values(found) == column_values(ApiToken.objects.get(pk=token.pk))
    assert found.user == scenario.alice


def test_missing_row_is_none() -> None:
    assert CompiledLookup(Namespace, ("name",)).first("nowhere") is None


def test_found_row_can_be_saved(scenario: Scenario) -> None:
    found = CompiledLookup(Namespace, ("name",)).first("lab")
    assert found is not None
    found.description = "changed"
    found.save()
    scenario.lab.refresh_from_db()
    assert scenario.lab.description == "changed"
