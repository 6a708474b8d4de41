"""Validators for the fields of `clusters.models`; their messages appear on the admin pages.

They check values only and access neither the database nor a cluster.
"""

from __future__ import annotations

import re
import string
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from clusters.errors import IdentityRefused
from clusters.transport.identity import check_unix_name
from core.translation import translate

SLURM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}\Z")
NAMESPACE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z")
# Features joined by Slurm's operators: "a100&nvlink", "[rack1|rack2]*2".
CONSTRAINT = re.compile(r"[A-Za-z0-9_.,:&|*()\[\]-]{0,200}\Z")
HOST_KEY_TYPES = frozenset(
    {
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
        "ecdsa-sha2-nistp384",
        "ecdsa-sha2-nistp521",
        "ssh-rsa",
    }
)


def validate_namespace_name(value: str) -> None:
    if not NAMESPACE_NAME.match(value):
        raise ValidationError(
            _(
                "Use letters, digits, dots, hyphens and underscores, beginning with a letter or a "
                "digit; at most 63."
            ),
            code="name",
        )


def validate_unix_name(value: str) -> None:
    try:
        check_unix_name(value)
    except IdentityRefused as refused:
        raise ValidationError(translate(refused.user_message), code="unix_name") from refused


def validate_slurm_name(value: str) -> None:
    if not SLURM_NAME.match(value):
        raise ValidationError(
            _("“%(value)s” is not a valid name of a Slurm partition, account or QOS."),
            code="slurm_name",
            params={"value": value},
        )


def validate_constraint(value: str) -> None:
    if not CONSTRAINT.match(value):
        raise ValidationError(
            _("Give node features joined by Slurm's operators, for example a100&nvlink."),
            code="constraint",
        )


def validate_partitions(value: Any) -> None:
    """An ordered list of partition names without duplicates. The model field itself refuses an empty list."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValidationError(_("Give a list of partition names."), code="type")
    for item in value:
        validate_slurm_name(item)
    if len(set(value)) != len(value):
        raise ValidationError(_("A partition is listed twice."), code="duplicate")


def validate_string_map(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValidationError(
            _("Give pairs of text, for example {“tensorflow:2.15”: “tensorflow-2.15.sif”}."),
            code="type",
        )


def validate_storages(value: Any) -> None:
    validate_string_map(value)
    for name, folder in value.items():
        if not folder.startswith(("/", "~/")):
            raise ValidationError(
                _("Storage “%(name)s”: the directory must begin with / or ~/."),
                params={"name": name},
            )


def validate_path_list(value: Any) -> None:
    if not isinstance(value, list) or not all(
        isinstance(item, str) and item.startswith("/") and "\n" not in item for item in value
    ):
        raise ValidationError(_("Give a list of absolute paths."), code="type")


def validate_absolute_path(value: str) -> None:
    if not value.startswith("/") or any(ord(letter) < 32 for letter in value):
        raise ValidationError(_("Give an absolute path, beginning with “/”."), code="path")


def _placeholders(value: str) -> set[str]:
    """The names in braces. "?" stands for one with a conversion or a format, as in {user!r}, which is not allowed."""
    try:
        parts = list(string.Formatter().parse(value))
    except ValueError as error:
        raise ValidationError(
            _("A brace is not closed: write {user} or {home}."), code="template"
        ) from error
    names = set()
    for _text, name, spec, conversion in parts:
        if name is None:
            continue
        if spec or conversion:
            names.add("?")
        names.add(name)
    return names


def validate_user_path(value: str) -> None:
    """An absolute path per user: contains {user} or {home}, and {home} only at the beginning."""
    names = _placeholders(value)
    if names - {"user", "home"}:
        raise ValidationError(
            _("Only {user} and {home} are replaced in this path."), code="template"
        )
    if "{home}" in value[1:]:
        raise ValidationError(_("{home} is a whole path, so it must come first."), code="template")
    if not value.startswith("{home}"):
        validate_absolute_path(value)
    if ".." in value.split("/"):
        raise ValidationError(_("Write the path without “..”."), code="path")
    if not names:
        raise ValidationError(
            _("Every person needs a directory of their own: use {user} or {home} in the path."),
            code="template",
        )


def validate_key_file(value: str) -> None:
    if _placeholders(value) != {"user"}:
        raise ValidationError(
            _("Every person needs a key of their own: use {user} in the path."), code="template"
        )
    validate_absolute_path(value)


def parse_host_key(line: str) -> str:
    """Return the key of a line as `type base64`. Accepts lines of known_hosts, of ssh-keyscan and of *.pub files."""
    fields = line.split()
    if fields and fields[0] not in HOST_KEY_TYPES:
        fields = fields[1:]  # lines of known_hosts and ssh-keyscan begin with the host names
    if len(fields) < 2 or fields[0] not in HOST_KEY_TYPES:
        raise ValidationError(
            _(
                "“%(line)s” is not a host key. Give one per line as printed by ssh-keyscan, for "
                "example: ssh-ed25519 AAAAC3Nza…"
            ),
            code="host_key",
            params={"line": line[:60]},
        )
    try:
        load_ssh_public_key(f"{fields[0]} {fields[1]}".encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValidationError(
            _("The %(type)s key is truncated or damaged: copy the whole line."),
            code="host_key",
            params={"type": fields[0]},
        ) from error
    return f"{fields[0]} {fields[1]}"


def parse_host_keys(value: str) -> list[str]:
    """The pinned keys of a text, normalized, without blank lines and `#` comments."""
    lines = (line.strip() for line in value.splitlines())
    return [parse_host_key(line) for line in lines if line and not line.startswith("#")]


def validate_host_keys(value: str) -> None:
    parse_host_keys(value)
