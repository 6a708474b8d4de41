"""The identity rules of SSH connections: which host keys are trusted, and which Unix users Sluice may act as.

Refuses root, system accounts and names that programs misread, before a connection is made. Independent of the SSH
library: the functions take text and numbers. The only I/O is a lookup in the user database of this machine.
"""

from __future__ import annotations

import base64
import hashlib
import pwd
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clusters.errors import AuthFailed, HostKeyMismatch, IdentityRefused
from core.messages import msg

# Allows j.doe and the name@realm of directory services, but no leading hyphen or dot, no blanks and no slashes. A name
# of digits only is refused, because chown, id and sudo take it for a UID ("0" is root).
USER_NAME = re.compile(r"(?!\d+\Z)[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}\Z", re.ASCII)
FORBIDDEN_NAMES = frozenset({"root", "toor"})


def check_unix_name(name: str) -> None:
    """Raise IdentityRefused unless Sluice may act as a Unix user of this name."""
    if name.lower() in FORBIDDEN_NAMES:
        raise IdentityRefused(
            msg(
                "identity.sluice-never-acts-map",
                "Sluice never runs commands as %(name)s. Map this person to their own Unix account.",
                name=name,
            )
        )
    if not USER_NAME.match(name):
        raise IdentityRefused(
            msg(
                "identity.not-user-name-sluice",
                "%(name)r cannot be used as a Unix user name: use letters, digits, dot, underscore, hyphen and @ only; do not start with a hyphen or a dot; not digits only. Ask an administrator to map you to another name.",
                name=name,
            )
        )


def check_uid(name: str, uid: int, floor: int) -> None:
    """Raise IdentityRefused for UID 0 (root, whatever its name) and for UIDs below `floor` (system accounts)."""
    if uid == 0:
        raise IdentityRefused(
            msg(
                "identity.unix-user-uid-root",
                "Unix user %(name)s has UID 0 (root). Sluice never runs commands as root.",
                name=name,
            )
        )
    if uid < floor:
        raise IdentityRefused(
            msg(
                "identity.unix-user-uid-sluice",
                "Unix user %(name)s has UID %(uid)s, below the lowest allowed UID %(floor)s. Map this person to their own Unix account.",
                name=name,
                uid=uid,
                floor=floor,
            )
        )


@dataclass(frozen=True, slots=True)
class IdentityPolicy:
    """Which Unix users Sluice may act as on one cluster: those with a valid name and a UID of at least `min_uid`."""

    min_uid: int = 1000

    def check_user(self, user: str, uid: int | None = None) -> None:
        """Raise IdentityRefused for a forbidden name or UID. Checks `uid` and the user's UID on this machine."""
        check_unix_name(user)
        for known_uid in (uid, _local_uid(user)):
            if known_uid is not None:
                self.check_uid(user, known_uid)

    def check_uid(self, user: str, uid: int) -> None:
        check_uid(user, uid, self.min_uid)


# Run after the login: the login node may map a name to another account, so the UID that `id` prints is checked too.
LOGIN_UID_COMMAND = "exec id -u"


def check_login_uid(
    policy: IdentityPolicy, *, host: str, user: str, stdout: bytes, stderr: bytes
) -> None:
    """Check the output of LOGIN_UID_COMMAND. Raises AuthFailed if it is no UID, IdentityRefused for a forbidden UID."""
    if not stdout.strip().isdigit():
        raise AuthFailed(
            msg(
                "ssh.does-not-say-user",
                "%(name)s did not return the account of user %(user)s.",
                name=host,
                user=user,
            ),
            detail=repr((stdout, stderr)),
        )
    policy.check_uid(user, int(stdout))


def _local_uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


# -- host keys -------------------------------------------------------------------------------------


def host_key_fingerprint(key_base64: str) -> str:
    """The SHA-256 fingerprint of a host key, in the format of `ssh-keygen -lf`."""
    digest = hashlib.sha256(base64.b64decode(key_base64)).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def order_host_key_types(offered: Iterable[str], pinned_lines: Sequence[str]) -> list[str]:
    """Sort the algorithms so that those of pinned keys come first.

    A server with several host keys then presents one that is pinned.
    """
    pinned_types = {line.split()[0] for line in pinned_lines}

    def is_pinned(algorithm: str) -> bool:
        # rsa-sha2-256 and rsa-sha2-512 are signatures of an ssh-rsa key.
        key_type = "ssh-rsa" if algorithm.startswith("rsa-sha2") else algorithm
        return key_type in pinned_types

    return sorted(offered, key=lambda algorithm: not is_pinned(algorithm))


def check_host_key(
    *, host: str, pinned_lines: Sequence[str], key_type: str, key_base64: str
) -> None:
    """Raise HostKeyMismatch unless the key is pinned. `pinned_lines` have the format of a .pub file."""
    pinned = {tuple(line.split()[:2]) for line in pinned_lines}
    if (key_type, key_base64) in pinned:
        return
    shown = f"{key_type} {host_key_fingerprint(key_base64)}"
    advice = msg(
        "ssh.nothing-sent-ask-administrator",
        "Nothing was sent. Ask the host's administrator for the fingerprint (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub). Only if it is the same, pin this key for the cluster: %(kind)s %(key)s",
        kind=key_type,
        key=key_base64,
    )
    if not pinned:
        raise HostKeyMismatch(
            msg(
                "ssh.no-host-key-pinned",
                "No host key is pinned for %(name)s, so Sluice does not connect. The host presents %(shown)s. %(advice)s",
                name=host,
                shown=shown,
                advice=advice,
            )
        )
    raise HostKeyMismatch(
        msg(
            "ssh.shows-host-key-not",
            "%(name)s presents the host key %(shown)s, which is not the pinned one. Either the host was reinstalled or the connection is intercepted. %(advice)s",
            name=host,
            shown=shown,
            advice=advice,
        )
    )
