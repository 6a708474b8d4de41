"""Single rows found by the values of some columns, with SQL and conversions made once.

For what every request asks (whose token, which namespace, which Unix account): the ORM takes longer to
compile such a query than the database to answer it. The objects are the ORM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Field, Model

M = TypeVar("M", bound=Model)


@dataclass(frozen=True)
class Prepared(Generic[M]):
    """`model.objects.filter(**columns).first()`, with the row that `related` points to."""

    model: type[M]
    columns: tuple[str, ...]
    related: str = ""

    def first(self, *values: Any) -> M | None:
        with connection.cursor() as cursor:
            cursor.execute(self._sql, values)
            row = cursor.fetchone()
        if row is None:
            return None
        own = self._own
        found: M = own.made_of(row)
        if self._other is not None:
            setattr(found, self.related, self._other.made_of(row[len(own.fields) :]))
        return found

    @cached_property
    def _own(self) -> _Table:
        return _Table(self.model, "t")

    @cached_property
    def _other(self) -> _Table | None:
        if not self.related:
            return None
        other: Any = self.model._meta.get_field(self.related).related_model
        return _Table(other, "r")

    @cached_property
    def _sql(self) -> str:
        quote = connection.ops.quote_name
        selected, join = self._own.selected, ""
        if self._other is not None:
            field: Any = self.model._meta.get_field(self.related)
            selected += f", {self._other.selected}"
            join = f" JOIN {self._other.name} ON r.id = t.{quote(field.column)}"
        where = " AND ".join(f"t.{quote(column)} = %s" for column in self.columns)
        return f"SELECT {selected} FROM {self._own.name}{join} WHERE {where} LIMIT 1"  # noqa: S608


class _Table:
    """How the columns of one model are asked for and made into an object of it."""

    def __init__(self, model: type[Model], alias: str) -> None:
        quote = connection.ops.quote_name
        self._model = model
        self.fields: Sequence[Field[Any, Any]] = model._meta.concrete_fields
        self.name = f"{quote(model._meta.db_table)} {alias}"
        self.selected = ", ".join(f"{alias}.{quote(str(field.column))}" for field in self.fields)
        self._names = [field.attname for field in self.fields]
        columns = [field.get_col(alias) for field in self.fields]
        self._converters = [
            (place, column, converter)
            for place, column in enumerate(columns)
            for converter in (
                *connection.ops.get_db_converters(column),
                *column.get_db_converters(connection),
            )
        ]

    def made_of(self, row: Sequence[Any]) -> Any:
        values = list(row[: len(self._names)])
        for place, column, convert in self._converters:
            values[place] = convert(values[place], column, connection)
        return self._model.from_db(connection.alias, self._names, values)
