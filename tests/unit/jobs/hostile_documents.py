"""Job files of any size in which one list or mapping has all the entries, for tests of cost.

The lists are found in the model and in the samples of the importers, so that a new field is tested without a change here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from jobs.jobfile.limits import MAX_ITEMS, MAX_ITEMS_BY_KEY
from jobs.jobfile.model import JobSpec
from jobs.jobfile.rules import MAX_ROLES
from tests.unit.jobs.importer_effects import SAMPLES, _set_value

MakeDocument = Callable[[int], Any]
BASE: Mapping[str, Any] = {"jobName": "j", "taskRoles": [{"name": "w", "command": "true"}]}
# The first candidate that a field accepts is its value in entry i.
SCALARS: tuple[Callable[[int], Any], ...] = (
    lambda i: f"name{i}",
    lambda i: f"/path/{i}",
    lambda i: i + 1,
    lambda i: True,
    lambda i: "2030-01-31 18:00:00",
    lambda i: "FAILED",
    lambda i: "ssh",
    lambda i: "info",
)
# Values that no field of the model accepts as an entry.
INVALID = ({"name": {}}, [[]], {"taskNumbr": 1, "labl": 2})


def limit_of(key: str) -> int:
    return MAX_ROLES if key in ("taskRoles", "config") else MAX_ITEMS_BY_KEY.get(key, MAX_ITEMS)


# -- lists and mappings of the model


def _unwrap(annotation: Any) -> Any:
    """Return the annotation without Annotated and None."""
    if get_origin(annotation) is Annotated:
        return _unwrap(get_args(annotation)[0])
    options = [one for one in get_args(annotation) if one is not type(None)]
    if type(None) in get_args(annotation) and len(options) == 1:
        return _unwrap(options[0])
    return annotation


def make_value(annotation: Any, i: int) -> Any:
    """Make a valid value of entry i for a type of the model."""
    plain = _unwrap(annotation)
    if isinstance(plain, type) and issubclass(plain, BaseModel):
        return {
            field.alias or name: make_field_value(field, i)
            for name, field in plain.model_fields.items()
            if field.is_required() or (_unwrap(field.annotation) is str and name in ("name",))
        }
    adapter = TypeAdapter(annotation)
    for candidate in SCALARS:
        try:
            adapter.validate_python(candidate(i))
        except ValidationError:
            continue
        return candidate(i)
    raise AssertionError(f"add a value for {annotation} to SCALARS")


def make_field_value(field: FieldInfo, i: int) -> Any:
    annotation: Any = field.annotation
    return make_value(Annotated[(annotation, *field.metadata)] if field.metadata else annotation, i)  # type: ignore[misc]


def list_containers(
    model: type[BaseModel] = JobSpec, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """List the path and the type of every list and mapping in the model."""
    for name, field in model.model_fields.items():
        loc = (*path, field.alias or name)
        kind = _unwrap(field.annotation)
        if get_origin(kind) in (tuple, list, dict):
            yield loc, kind
            item = _unwrap(get_args(kind)[0])
            if isinstance(item, type) and issubclass(item, BaseModel):
                yield from list_containers(item, (*loc, 0))
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from list_containers(kind, loc)


def _place(document: Any, path: tuple[str | int, ...], value: Any, model: Any = JobSpec) -> None:
    """Set the value at a path; missing sections are made with their required fields."""
    field = next(f for n, f in model.model_fields.items() if (f.alias or n) == path[0])
    if len(path) == 1:
        document[path[0]] = value
        return
    kind = _unwrap(field.annotation)
    inner = _unwrap(get_args(kind)[0]) if get_origin(kind) else kind
    if get_origin(kind):
        section = document.setdefault(path[0], [make_value(inner, 0)])[0]
        rest = path[2:]
    else:
        section = document.setdefault(path[0], make_value(inner, 0))
        rest = path[1:]
    _place(section, rest, value, inner)


def make_entries(kind: Any, n: int, variant: str) -> Any:
    """Make a list or mapping with n entries: different, equal, or invalid ones."""
    arguments = get_args(kind)
    if get_origin(kind) is dict:
        if variant == "invalid":
            return {f"-{i} ": INVALID[i % len(INVALID)] for i in range(n)}
        prefix = "PAI_" if variant == "equal" else ""  # keys are never equal; these are reserved
        return {
            f"{prefix}{make_value(arguments[0], i)}": make_value(arguments[1], i) for i in range(n)
        }
    if variant == "invalid":
        return [INVALID[i % len(INVALID)] for i in range(n)]
    entries = [make_value(arguments[0], i if variant == "different" else 0) for i in range(n)]
    if variant == "equal":
        for entry in entries:
            if isinstance(entry, dict) and "label" in entry:  # ports: all overlap
                entry |= {"beginAt": 2000, "portNumber": 1000}
    return entries


def list_model_cases() -> Iterator[tuple[str, int, MakeDocument]]:
    """List (name, largest n, function that makes the job file) of every list of the model and every variant."""
    for path, kind in list_containers():
        for variant in ("different", "equal", "invalid"):

            def make(n: int, path: Any = path, kind: Any = kind, variant: str = variant) -> Any:
                document = copy.deepcopy(dict(BASE))
                _place(document, path, make_entries(kind, n, variant))
                return document

            name = ".".join(map(str, path))
            yield f"{name}, {variant}", limit_of(str(path[-1])), make


# -- lists and mappings of the importers


def _list_sample_containers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[Any]:
    if isinstance(value, dict) and value:
        yield path
        for key, item in value.items():
            yield from _list_sample_containers(item, (*path, key))
    elif isinstance(value, list) and value:
        yield path
        yield from _list_sample_containers(value[0], (*path, 0))


def _enlarge(container: Any, n: int, equal: bool) -> Any:
    """Repeat the entries of a list or mapping, with other names if they have one."""
    entries = list(container.values()) if isinstance(container, dict) else container
    keys = list(container) if isinstance(container, dict) else []
    repeated = [copy.deepcopy(entries[i % len(entries)]) for i in range(n)]
    for i, entry in enumerate(repeated):
        if not equal and i >= len(entries) and isinstance(entry, dict) and "name" in entry:
            entry["name"] = f"{entry['name']}{i}"
    if not keys:
        return repeated
    return {
        keys[i] if i < len(keys) else f"{keys[i % len(keys)]}{i}": e for i, e in enumerate(repeated)
    }


def list_importer_cases() -> Iterator[tuple[str, int, MakeDocument]]:
    """List (name, largest n, function that makes the file) of every list in the samples of the importers."""
    seen: set[Any] = set()
    for dialect, (base, fields) in SAMPLES.items():
        for field, value in fields.items():
            document = copy.deepcopy(dict(base))
            _set_value(document, field, copy.deepcopy(value))
            top = field.split(" ")[0].split(".")[0]
            plugin = field.partition(" ")[2]
            for path in _list_sample_containers(document.get(top), (top,)):
                if (dialect, plugin, path) in seen:
                    continue
                seen.add((dialect, plugin, path))
                for equal in (False, True):

                    def make(
                        n: int, document: Any = document, path: Any = path, equal: bool = equal
                    ) -> Any:
                        result = copy.deepcopy(document)
                        parent: Any = result
                        for part in path[:-1]:
                            parent = parent[part]
                        parent[path[-1]] = _enlarge(parent[path[-1]], n, equal)
                        return result

                    where = ".".join(map(str, path))
                    variant = "equal" if equal else "different"
                    yield f"{dialect} {field}: {where}, {variant}", limit_of(str(path[-1])), make
