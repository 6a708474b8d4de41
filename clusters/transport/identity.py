"""Whom Sluice will act as on a cluster, and whom never: root, system accounts, names that tools misread.

Asked before any connection or process is made. Pure but for one look into the local user database.
"""

from __future__ import annotations

import pwd
import re
from dataclasses import dataclass

from clusters.errors import IdentityRefused
from core.messages import _

# Also j.doe, and name@realm of directory services. No leading dash or dot, no blanks, no slashes. A
# name of digits alone is out: chown, id and sudo would read it as a UID ("0" is root).
USER_NAME = re.compile(r"(?!\d+\Z)[A-Za-z0-9_][A-Za-z0-9_.@-]{0,63}\Z", re.ASCII)
FORBIDDEN_NAMES = frozenset({"root", "toor"})


def check_unix_name(name: str) -> None:
    """Raise IdentityRefused unless `name` may be somebody on a cluster."""
    if name.lower() in FORBIDDEN_NAMES:
        raise IdentityRefused(
            _(
                "Sluice never acts as %(name)s. Map this person to a Unix account of their own.",
                name=name,
            )
        )
    if not USER_NAME.match(name):
        raise IdentityRefused(
            _(
                "%(name)r is not a user name that Sluice will use on a cluster: letters, digits, dot, "
                "underscore, hyphen and @ only, not starting with a hyphen or a dot, not only digits. "
                "An administrator can map this person to another name.",
                name=name,
            )
        )


def check_uid(name: str, uid: int, floor: int) -> None:
    """Raise IdentityRefused for root under any name, and for system accounts below the floor."""
    if uid == 0:
        raise IdentityRefused(
            _("Unix user %(name)s has UID 0, which is root. Sluice never acts as root.", name=name)
        )
    if uid < floor:
        raise IdentityRefused(
            _(
                "Unix user %(name)s has UID %(uid)s, and Sluice never acts as a user below UID "
                "%(floor)s here. Map this person to a Unix account of their own.",
                name=name,
                uid=uid,
                floor=floor,
            )
        )


@dataclass(frozen=True, slots=True)
class IdentityPolicy:
    """The rule as a transport is given it."""

    min_uid: int = 1000

    def check_name(self, user: str, uid: int | None = None) -> None:
        """Refuse `user` by its name, by the UID it is mapped to, or by the UID it has here."""
        check_unix_name(user)
        for known in (uid, _local_uid(user)):
            if known is not None:
                self.check_uid(user, known)

    def check_uid(self, user: str, uid: int) -> None:
        check_uid(user, uid, self.min_uid)


def _local_uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
