"""Sluice's SSH certificate authority: one ed25519 key in a file, and certificates valid for minutes.

Creates the CA key file at the first use (mode 0600 in a directory with mode 0700) and sets what a certificate permits.
Does not decide which person may act as which user, and opens no connection.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    SSHCertificateBuilder,
    SSHCertificateType,
    SSHPrivateKeyTypes,
)

from clusters.errors import ClusterError
from core.messages import msg

DEFAULT_VALID_S = 600
# Certificates are valid from this long before they are signed: sshd refuses one that is not valid yet, and the login
# node's clock may be behind.
CLOCK_TOLERANCE_S = 120


class CaKeyUnusable(ClusterError):
    """The CA key file exists but its content, mode or owner is wrong."""


@dataclass(frozen=True, slots=True)
class LoginKey:
    """A private key in OpenSSH's format and, if there is one, its certificate as in a -cert.pub file."""

    private_key: str = field(repr=False)
    certificate: str = ""


def encode_private_key(key: SSHPrivateKeyTypes | PrivateKeyTypes) -> bytes:
    """An unencrypted key as text in OpenSSH's format, which every SSH library can load."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


@dataclass(frozen=True)
class CertificateAuthority:
    """The CA key at `path`, created on first use."""

    path: Path

    @cached_property
    def _key(self) -> Ed25519PrivateKey:
        if not self.path.exists():
            _create_key_file(self.path)
        _check_permissions(self.path)
        try:
            key = serialization.load_ssh_private_key(self.path.read_bytes(), password=None)
        except (ValueError, TypeError) as problem:
            raise CaKeyUnusable(
                msg(
                    "ssh.not-unencrypted-openssh-private",
                    "%(path)s is not an unencrypted OpenSSH private key. Restore it from a backup, or move it away so that Sluice creates a new one (every cluster must then trust the new key).",
                    path=self.path,
                )
            ) from problem
        if not isinstance(key, Ed25519PrivateKey):
            raise CaKeyUnusable(
                msg(
                    "ssh.not-ed-key-sluice",
                    "%(path)s is not an ed25519 key. Sluice signs with ed25519 only.",
                    path=self.path,
                )
            )
        return key

    def public_key_line(self) -> str:
        """The line for the file named by sshd's TrustedUserCAKeys."""
        raw = self._key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        return f"{raw.decode()} sluice-ca"

    def sign(
        self, user: str, *, valid_s: float = DEFAULT_VALID_S, allow_tunnel: bool = False
    ) -> LoginKey:
        """A new key that may log in as `user` only, for `valid_s` seconds from now. It is held in memory only.

        The certificate permits commands and SFTP, but no terminal, agent forwarding, X11 or user rc file; TCP
        forwarding only with `allow_tunnel`.
        """
        now = time.time()
        private_key = Ed25519PrivateKey.generate()
        builder = (
            SSHCertificateBuilder()
            .public_key(private_key.public_key())
            .serial(secrets.randbits(63))
            .type(SSHCertificateType.USER)
            .key_id(f"sluice:{user}".encode())  # sshd logs it at each login
            .valid_principals([user.encode()])
            .valid_after(int(now) - CLOCK_TOLERANCE_S)
            .valid_before(int(now + valid_s))
        )
        if allow_tunnel:
            builder = builder.add_extension(b"permit-port-forwarding", b"")
        certificate = builder.sign(self._key).public_bytes()
        return LoginKey(encode_private_key(private_key).decode(), certificate.decode())


def _create_key_file(path: Path) -> None:
    """Create the CA key. If several processes do so at once, all use the first complete file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = encode_private_key(Ed25519PrivateKey.generate())
    temp_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temp_path, path)
        except FileExistsError:
            return
    finally:
        os.unlink(temp_path)


def _check_permissions(path: Path) -> None:
    for place, forbidden_bits, wanted in ((path.parent, 0o022, "go-w"), (path, 0o077, "0600")):
        found = os.stat(place)
        if stat.S_IMODE(found.st_mode) & forbidden_bits:
            raise CaKeyUnusable(
                msg(
                    "ssh.open-others-mode-whoever",
                    "%(place)s is accessible to others (mode %(mode)s). The CA key allows logins as any user: run chmod %(wanted)s %(place)s.",
                    place=place,
                    mode=f"{stat.S_IMODE(found.st_mode):04o}",
                    wanted=wanted,
                )
            )
        if found.st_uid not in (0, os.geteuid()):
            raise CaKeyUnusable(
                msg(
                    "ssh.belongs-another-user-give",
                    "%(place)s belongs to another user. Change its owner to the user that Sluice runs as.",
                    place=place,
                )
            )
