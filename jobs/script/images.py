"""Resolves the name of a container image in a job file to an image file on the cluster. Pure: accesses no files.

A name is an alias that the cluster's settings define, a path, a file in the cluster's image directory, or else
a name in a registry. The batch script fetches images of a registry into the image cache directory.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection
from dataclasses import dataclass

from jobs.script.render_options import RenderOptions

_IMAGE_SUFFIX_BY_RUNTIME = {
    "apptainer": ".sif",
    "singularity": ".sif",
    "enroot": ".sqsh",
    "pyxis": ".sqsh",
}
_IMAGE_SUFFIXES = (".sif", ".sqsh", ".img")
_UNSAFE_FILE_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")
_URI_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """The image file of a role, and where to fetch it from."""

    path: str  # may begin with ~/, the home directory of the job's owner
    # URI in a registry, from which the batch script fetches the image if `path` does not exist; empty: not fetched.
    source: str = ""
    name: str = ""  # the image's name in the job file, or the namespace's default image


def filter_image_files(names: Collection[str]) -> frozenset[str]:
    """Select the names of image files from a directory listing, for `RenderOptions.image_files`."""
    return frozenset(name for name in names if name.endswith(_IMAGE_SUFFIXES))


def select_runtime_files(names: Collection[str], runtime: str) -> list[str]:
    """Select the image files that this container runtime can start."""
    suffix = _IMAGE_SUFFIX_BY_RUNTIME[runtime]
    return [name for name in names if name.endswith(suffix)]


def _list_candidate_files(name: str, runtime: str) -> tuple[str, ...]:
    """List the file names in an image directory that an image's name may refer to, best match first."""
    suffix = _IMAGE_SUFFIX_BY_RUNTIME[runtime]
    safe_name = _UNSAFE_FILE_CHARACTER.sub("_", name)
    names = (
        safe_name if safe_name.endswith(suffix) else safe_name + suffix,
        posixpath.basename(safe_name),
    )
    return tuple(dict.fromkeys(n for n in names if n.endswith(suffix)))


def resolve_image(name: str, options: RenderOptions) -> ResolvedImage:
    """Find the image file for the name of an image. `options.runtime` is not "none"."""
    runtime = options.runtime
    name = options.image_aliases.get(name, name)
    if name.startswith(("/", "~/")):
        return ResolvedImage(name)
    unprefixed = name.removeprefix("docker://")
    if options.images_dir:
        for file in _list_candidate_files(unprefixed, runtime):
            if file in options.image_files:
                return ResolvedImage(posixpath.join(options.images_dir, file))
        if unprefixed.endswith(_IMAGE_SUFFIXES):
            return ResolvedImage(posixpath.join(options.images_dir, posixpath.basename(unprefixed)))
    source = name if _URI_SCHEME.match(name) else f"docker://{name}"
    if runtime in ("enroot", "pyxis"):
        source = _to_enroot_uri(source)
    cache_file = _UNSAFE_FILE_CHARACTER.sub("_", unprefixed) + _IMAGE_SUFFIX_BY_RUNTIME[runtime]
    return ResolvedImage(posixpath.join(options.image_cache_dir, cache_file), source)


def _to_enroot_uri(source: str) -> str:
    """Convert a URI to enroot's syntax, which has # after the registry: docker://nvcr.io#nvidia/pytorch:24.01."""
    scheme, _, rest = source.partition("://")
    registry, slash, image = rest.partition("/")
    if slash and "#" not in rest and ("." in registry or ":" in registry):
        return f"{scheme}://{registry}#{image}"
    return source
