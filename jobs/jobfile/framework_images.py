"""Which version of a training framework an image has, by the image's name: tensorflow:2.15, tensorflow_2.15.sif. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jobs.jobfile.frameworks import list_framework_names, list_frameworks

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_FILE_SUFFIX = re.compile(r"\.(sif|sqsh|img)$", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class FrameworkImage:
    """An image with a version of a framework. `image` is its name in job files."""

    framework: str
    version: str
    image: str


def list_framework_images(names: Iterable[str]) -> tuple[FrameworkImage, ...]:
    """Select the images whose names state a framework and a version, newest version first.

    Of several names for the same version, the first is used.
    """
    found: dict[tuple[str, str], FrameworkImage] = {}
    for name in names:
        for framework in list_frameworks():
            if version := read_version(framework, name):
                found.setdefault((framework, version), FrameworkImage(framework, version, name))
    by_version = sorted(found.values(), key=lambda row: _sort_key(row.version), reverse=True)
    return tuple(sorted(by_version, key=lambda row: row.framework))


def read_version(framework: str, image: str) -> str:
    """Return the version of this framework that the name of an image states; empty if it states none.

    The last part of the name must be framework and version, separated by : _ or -, and the version must begin with
    a digit. The framework may be written twice, as in file names of images such as tensorflow/tensorflow:2.15.
    """
    last_part = _FILE_SUFFIX.sub("", _SCHEME.sub("", image)).rsplit("/", 1)[-1]
    names = "|".join(map(re.escape, list_framework_names(framework)))
    pattern = rf"(?:(?:{names})[_-])?(?:{names})[:_-]v?(\d[A-Za-z0-9._+-]*)"
    match = re.fullmatch(pattern, last_part, re.IGNORECASE)
    return match[1] if match else ""


def _sort_key(version: str) -> list[tuple[int, str]]:
    """Order 2.9 before 2.15."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in _NUMBER.split(version) if part
    ]
