"""Which Unix users Sluice will act as, and which never: root, names that tools misread, low UIDs.

Every way to a cluster asks here before it connects. Pure: no Django, no I/O.
"""

from __future__ import annotations

import re

from clusters.errors import IdentityRefused

# useradd(8) of the big distributions, plus the dots and capitals that directory services bring. A
# name of digits alone is out: chown, id and sudo would read it as a UID ("0" is root).
UNIX_NAME = re.compile(r"(?!\d+\Z)[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\Z")
FORBIDDEN_NAMES = frozenset({"root", "toor"})


def check_unix_name(name: str) -> None:
    """Raise IdentityRefused unless `name` may be a person on a cluster."""
    if name.lower() in FORBIDDEN_NAMES:
        raise IdentityRefused(
            f"Sluice never acts as {name}. Map the person to a Unix user of their own."
        )
    if not UNIX_NAME.match(name):
        raise IdentityRefused(
            f"{name!r} cannot be a Unix user name: use up to 32 letters, digits, dots, hyphens and "
            "underscores, not only digits. An administrator can map the person to another name."
        )


def check_uid(name: str, uid: int, floor: int) -> None:
    """Raise IdentityRefused for root under any name, and for system accounts below the floor."""
    if uid == 0:
        raise IdentityRefused(
            f"Unix user {name} has UID 0, which is root. Sluice never acts as root."
        )
    if uid < floor:
        raise IdentityRefused(
            f"Unix user {name} has UID {uid}, below the floor of {floor} that is set for this "
            "cluster. System accounts are not for people; map the person to their own account."
        )
