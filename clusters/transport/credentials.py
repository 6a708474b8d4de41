"""The keys with which Sluice logs in to a login node: a new certificate per connection, or a key file per user.

This module opens no connection.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives import serialization

from clusters.errors import AuthFailed
from clusters.transport.certificates import (
    DEFAULT_VALID_S,
    CertificateAuthority,
    LoginKey,
    encode_private_key,
)
from core.messages import Message, msg


class Credentials(Protocol):
    """Provides the key with which Sluice authenticates to the login node as a user."""

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> LoginKey: ...

    def remedy(self, user: str) -> Message:
        """What a sysadmin should check if the login node refuses the key."""
        ...


@dataclass(frozen=True)
class CertificateCredentials:
    """A new key and certificate for each connection.

    sshd checks a certificate only at login, so a connection may outlive it; the next connection has a new one.
    """

    authority: CertificateAuthority
    valid_s: float = DEFAULT_VALID_S

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> LoginKey:
        return self.authority.sign(user, valid_s=self.valid_s, allow_tunnel=allow_tunnel)

    def remedy(self, user: str) -> Message:
        return msg(
            "ssh.check-login-node-account",
            "Check on the login node that the account %(user)s exists and is not locked, that the file "
            "named by TrustedUserCAKeys in sshd_config holds Sluice's CA key, and that both clocks agree.",
            user=user,
        )


@dataclass(frozen=True)
class KeyFileCredentials:
    """One private key file per Unix user, for sites where sshd cannot trust a CA.

    `pattern` is the path of the files; `{user}` in it stands for the name of the Unix user.
    Only Sluice may read the files; the public half is in the user's authorized_keys.
    """

    pattern: str

    def key_for(self, user: str, *, allow_tunnel: bool = False) -> LoginKey:
        path = Path(self.pattern.replace("{user}", user))
        certificate_path = Path(f"{path}-cert.pub")
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise AuthFailed(
                    msg(
                        "ssh.key-file-may-read",
                        "The key file %(path)s is readable by others. Run chmod 0600 %(path)s.",
                        path=path,
                    )
                )
            private_key = _normalize_private_key(path.read_bytes())
            certificate = certificate_path.read_text().strip() if certificate_path.exists() else ""
        except OSError as problem:
            raise AuthFailed(
                msg(
                    "ssh.no-readable-key-file",
                    "There is no readable key file for %(user)s: %(path)s.",
                    user=user,
                    path=path,
                ),
                detail=str(problem),
            ) from problem
        except (ValueError, TypeError) as problem:
            raise AuthFailed(
                msg(
                    "ssh.key-file-not-private",
                    "The key file %(path)s is not a private key without a passphrase.",
                    path=path,
                ),
                detail=str(problem),
            ) from problem
        return LoginKey(private_key, certificate)

    def remedy(self, user: str) -> Message:
        path = self.pattern.replace("{user}", user)
        return msg(
            "ssh.check-login-node-account-exists",
            "Check on the login node that the account %(user)s exists and is not locked, and that its "
            "authorized_keys holds the public half of %(path)s.",
            user=user,
            path=path,
        )


def _normalize_private_key(data: bytes) -> str:
    """An unencrypted key in PEM or OpenSSH format, as OpenSSH text. Raises ValueError or TypeError."""
    openssh = b"BEGIN OPENSSH PRIVATE KEY" in data
    load = serialization.load_ssh_private_key if openssh else serialization.load_pem_private_key
    return encode_private_key(load(data, password=None)).decode()
