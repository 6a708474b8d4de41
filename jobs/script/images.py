"""Resolves an image's name in a job file to the image file on the cluster. Pure: accesses no files.

A name is an alias of the site, a path, a file in the site's image directory, or else a name in a registry.
The batch script fetches images of a registry into a cache directory of the job's owner.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_IMAGE_SUFFIX_BY_RUNTIME = {
    "apptainer": ".sif",
    "singularity": ".sif",
    "enroot": ".sqsh",
    "pyxis": ".sqsh",
}
_UNSAFE_FILE_CHARACTER = re.compile(r"[^A-Za-z0-9._-]")
_URI_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """The image file of a role, and where to fetch it from."""

    path: str  # may begin with ~/, the owner's home directory
    # URI in a registry; the batch script fetches it if `path` does not exist; empty: never.
    source: str = ""


def candidate_file_names(name: str, runtime: str) -> tuple[str, ...]:
    """File names in an image directory that an image's name may refer to, best match first."""
    suffix = _IMAGE_SUFFIX_BY_RUNTIME[runtime]
    safe_name = _UNSAFE_FILE_CHARACTER.sub("_", name)
    names = (
        safe_name if safe_name.endswith(suffix) else safe_name + suffix,
        posixpath.basename(safe_name),
    )
    return tuple(dict.fromkeys(n for n in names if n.endswith(suffix)))


def resolve_image(
    name: str,
    *,
    runtime: str,
    images_dir: str = "",
    files: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    cache_dir: str = "~/.cache/sluice/images",
) -> ResolvedImage:
    """Find the image file for the name of an image. `files` are the names of the files in `images_dir`."""
    name = (aliases or {}).get(name, name)
    if name.startswith(("/", "~/")):
        return ResolvedImage(name)
    if images_dir:
        unprefixed = name.removeprefix("docker://")
        for file in candidate_file_names(unprefixed, runtime):
            if file in files:
                return ResolvedImage(posixpath.join(images_dir, file))
        if unprefixed.endswith((".sif", ".sqsh", ".img")):
            return ResolvedImage(posixpath.join(images_dir, posixpath.basename(unprefixed)))
    source = name if _URI_SCHEME.match(name) else f"docker://{name}"
    if runtime in ("enroot", "pyxis"):
        source = _enroot_uri(source)
    cache_file_name = (
        _UNSAFE_FILE_CHARACTER.sub("_", name.removeprefix("docker://"))
        + _IMAGE_SUFFIX_BY_RUNTIME[runtime]
    )
    return ResolvedImage(posixpath.join(cache_dir, cache_file_name), source)


def _enroot_uri(source: str) -> str:
    """Convert a URI to enroot's syntax, which has # after the registry: docker://nvcr.io#nvidia/pytorch:24.01."""
    scheme, _, rest = source.partition("://")
    registry, slash, image = rest.partition("/")
    if slash and "#" not in rest and ("." in registry or ":" in registry):
        return f"{scheme}://{registry}#{image}"
    return source
