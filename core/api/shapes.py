"""API shapes: one TypedDict per JSON object that the API returns.

The TypedDict types the code that builds the response, and `serializer_of` derives the OpenAPI schema from it.
`RowShape` builds responses from database rows where every field declares its columns (`From`).
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
    """The field's description in the schema."""

    text: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of a Django choices field, with their labels."""

    pairs: Sequence[Any]


@dataclass(frozen=True, slots=True)
class From:
    """The columns that a field is built from. Without `build` the value is that of the only column."""

    columns: tuple[str, ...]
    build: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Sparse:
    """Marks a list with items that may lack fields, because a request can select fields."""


@dataclass(frozen=True, slots=True)
class _Format:
    field: type[serializers.Field[Any, Any, Any, Any]]


Timestamp = Annotated[str, _Format(serializers.DateTimeField)]
Uuid = Annotated[str, _Format(serializers.UUIDField)]


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
    """The serializer that describes the shape in the schema. Its component is named without `Shape`."""
    attributes: dict[str, Any] = {"__doc__": shape.__doc__, "__module__": shape.__module__}
    options = {"required": False} if sparse else {}
    for name, annotation in get_type_hints(shape, include_extras=True).items():
        attributes[name] = _field(annotation, **options)
    name = shape.__name__.removesuffix("Shape") + "Serializer"
    make_class: Any = type(serializers.Serializer)
    serializer: type[serializers.Serializer[Any]] = make_class(
        name, (serializers.Serializer,), attributes
    )
    return serializer


def _field(annotation: Any, **options: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is NotRequired:
        return _field(arguments[0], required=False, **options)
    if origin is Annotated:
        return _annotated_field(arguments[0], arguments[1:], options)
    if origin in (Union, UnionType):
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return _field(member, allow_null=True, **options)
    if origin is Literal:
        return serializers.ChoiceField(choices=list(arguments), **options)
    if origin is list:
        if is_typeddict(arguments[0]):
            return serializer_of(arguments[0])(many=True, **options)
        return serializers.ListField(child=_field(arguments[0]), **options)
    if origin is dict:
        return serializers.DictField(child=_field(arguments[1]), **options)
    if is_typeddict(annotation):
        return serializer_of(annotation)(**options)
    return _FIELD_TYPES[annotation](**options)


def _annotated_field(annotation: Any, metadata: Sequence[Any], options: dict[str, Any]) -> Any:
    for item in metadata:
        if isinstance(item, Help):
            options["help_text"] = item.text
        elif isinstance(item, Choices):
            return serializers.ChoiceField(choices=item.pairs, **options)
        elif isinstance(item, _Format):
            return item.field(**options)
        elif isinstance(item, Sparse):
            (item_shape,) = get_args(annotation)
            return serializer_of(item_shape, sparse=True)(many=True, **options)
    return _field(annotation, **options)


class RowShape(Generic[Row, Context]):
    """Builds one shape, or some of its fields, from rows and a context."""

    def __init__(self, shape: Any, fields: Collection[str] = ()) -> None:
        sources = _sources(shape)
        names = [name for name in sources if not fields or name in fields]
        # Computed fields first get the value of their first column, so that the order of keys is the shape's.
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
def _sources(shape: Any) -> dict[str, From]:
    """Field name → source, of the fields that declare one."""
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
    """ISO 8601 in UTC with a Z."""
    utc = value if value.tzinfo is UTC else value.astimezone(UTC)
    return utc.isoformat()[:-6] + "Z"


def format_optional_timestamp(value: datetime | None) -> str | None:
    return None if value is None else format_timestamp(value)
