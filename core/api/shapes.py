"""Shapes: a shape is the type of one JSON object of the API, a TypedDict with the object's fields.

The code that builds a response body is type-checked against the shape, and `serializer_of` derives the OpenAPI schema
from it. `RowShape` builds objects of a shape from database rows, if each field declares its columns with `From`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from rest_framework import serializers

Row = TypeVar("Row")
Context = TypeVar("Context")


@dataclass(frozen=True, slots=True)
class Help:
    """The description of a field in the OpenAPI schema."""

    text: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The allowed values of a field with their labels: the `choices` of a Django field."""

    pairs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class From:
    """The database columns that a field is built from.

    `build(row, context)` computes the value of the field; without `build` it is the value of the only column.
    """

    columns: tuple[str, ...]
    build: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Sparse:
    """Marks a list whose items may lack fields, because the request can select the fields it needs."""


@dataclass(frozen=True, slots=True)
class _SerializerField:
    """The DRF field class of a string in a special format, such as a UUID."""

    field: type[serializers.Field[Any, Any, Any, Any]]


Timestamp = Annotated[str, _SerializerField(serializers.DateTimeField)]
Uuid = Annotated[str, _SerializerField(serializers.UUIDField)]


class AnyJsonField(serializers.JSONField):
    """Any JSON value."""


_FIELD_TYPES: Mapping[Any, type[serializers.Field[Any, Any, Any, Any]]] = {
    str: serializers.CharField,
    int: serializers.IntegerField,
    float: serializers.FloatField,
    bool: serializers.BooleanField,
    Any: AnyJsonField,
}


@lru_cache(maxsize=256)
def serializer_of(shape: Any, sparse: bool = False) -> type[serializers.Serializer[Any]]:
    """Return the serializer that describes the shape in the OpenAPI schema.

    The name in the schema is that of the shape without the suffix `Shape`. If `sparse`, no field is required.
    """
    attributes: dict[str, Any] = {"__doc__": shape.__doc__, "__module__": shape.__module__}
    options = {"required": False} if sparse else {}
    for name, annotation in get_type_hints(shape, include_extras=True).items():
        attributes[name] = _build_field(annotation, **options)
    name = shape.__name__.removesuffix("Shape") + "Serializer"
    make_class: Any = type(serializers.Serializer)
    serializer: type[serializers.Serializer[Any]] = make_class(
        name, (serializers.Serializer,), attributes
    )
    return serializer


def _build_field(annotation: Any, **options: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is NotRequired:
        return _build_field(arguments[0], required=False, **options)
    if origin is Annotated:
        return _build_annotated_field(arguments[0], arguments[1:], options)
    if origin in (Union, UnionType):
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return _build_field(member, allow_null=True, **options)
    if origin is Literal:
        return serializers.ChoiceField(choices=list(arguments), **options)
    if origin is list:
        if is_typeddict(arguments[0]):
            return serializer_of(arguments[0])(many=True, **options)
        return serializers.ListField(child=_build_field(arguments[0]), **options)
    if origin is dict:
        return serializers.DictField(child=_build_field(arguments[1]), **options)
    if is_typeddict(annotation):
        return serializer_of(annotation)(**options)
    return _FIELD_TYPES[annotation](**options)


def _build_annotated_field(
    annotation: Any, metadata: Sequence[Any], options: dict[str, Any]
) -> Any:
    for item in metadata:
        if isinstance(item, Help):
            options["help_text"] = item.text
        elif isinstance(item, Choices):
            return serializers.ChoiceField(choices=item.pairs, **options)
        elif isinstance(item, _SerializerField):
            return item.field(**options)
        elif isinstance(item, Sparse):
            (item_shape,) = get_args(annotation)
            return serializer_of(item_shape, sparse=True)(many=True, **options)
    return _build_field(annotation, **options)


class RowShape(Generic[Row, Context]):
    """Builds objects of one shape from database rows; if `fields` is not empty, only with these fields.

    `columns` are the columns that the rows must have.
    """

    def __init__(self, shape: Any, fields: Collection[str] = ()) -> None:
        sources = _column_sources(shape)
        names = [name for name in sources if not fields or name in fields]
        # `build` first sets every field to the value of its first column and then replaces the computed ones, so
        # that the keys have the order of the shape.
        self._names = names
        self._values = _attributes_getter([sources[name].columns[0] for name in names])
        self._computed = [
            (name, build) for name in names if (build := sources[name].build) is not None
        ]
        self.columns = frozenset(column for name in names for column in sources[name].columns)

    def build(self, row: Row, context: Context) -> dict[str, Any]:
        item = dict(zip(self._names, self._values(row), strict=True))
        for name, build in self._computed:
            item[name] = build(row, context)
        return item


@lru_cache(maxsize=64)
def _column_sources(shape: Any) -> dict[str, From]:
    """Field name → `From`, for the fields that declare one."""
    return {
        name: item
        for name, annotation in get_type_hints(shape, include_extras=True).items()
        for item in getattr(annotation, "__metadata__", ())
        if isinstance(item, From)
    }


def _attributes_getter(columns: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    get: Any = attrgetter(*columns)
    return get if len(columns) > 1 else lambda row: (get(row),)


def format_timestamp(value: datetime) -> str:
    """The time in ISO 8601 format, in UTC, with the suffix Z."""
    utc = value if value.tzinfo is UTC else value.astimezone(UTC)
    return utc.isoformat()[:-6] + "Z"


def format_optional_timestamp(value: datetime | None) -> str | None:
    return None if value is None else format_timestamp(value)
