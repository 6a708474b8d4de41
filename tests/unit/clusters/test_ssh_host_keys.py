"""Host keys: only pinned keys are trusted, and their algorithms are requested first. UIDs after login are checked."""

from __future__ import annotations

import pytest

from clusters.errors import AuthFailed, HostKeyMismatch, IdentityRefused
from clusters.transport.identity import (
    IdentityPolicy,
    check_host_key,
    check_login_uid,
    host_key_fingerprint,
    order_host_key_types,
)

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIEKxLCDZBoJBGqKcQmYFYGQaJ1Vf8mqUX1oJsT9Rf5CC"
OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def check(pinned_lines: list[str]) -> None:
    check_host_key(host="login", pinned_lines=pinned_lines, key_type="ssh-ed25519", key_base64=KEY)


def test_comment_of_pinned_key_is_ignored() -> None:
    check([f"ssh-ed25519 {OTHER}", f"ssh-ed25519 {KEY} root@login"])


@pytest.mark.parametrize(
    ("pinned_lines", "text"),
    [([], "No host key is pinned"), ([f"ssh-ed25519 {OTHER}"], "not the pinned one")],
)
def test_other_key_is_rejected_with_its_fingerprint(pinned_lines: list[str], text: str) -> None:
    with pytest.raises(HostKeyMismatch, match=text) as caught:
        check(pinned_lines)
    assert host_key_fingerprint(KEY) in caught.value.user_message
    assert KEY in caught.value.user_message


def test_key_type_must_match() -> None:
    with pytest.raises(HostKeyMismatch):
        check([f"ssh-rsa {KEY}"])


def test_algorithms_of_pinned_keys_come_first() -> None:
    offered = ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256"]
    assert order_host_key_types(offered, [f"ssh-rsa {KEY}"]) == [
        "rsa-sha2-512",
        "rsa-sha2-256",
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
    ]
    assert order_host_key_types(offered, []) == offered


@pytest.mark.parametrize(
    ("stdout", "error"), [(b"0\n", IdentityRefused), (b"999\n", IdentityRefused), (b"", AuthFailed)]
)
def test_low_or_missing_uid_after_login_is_rejected(stdout: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_login_uid(IdentityPolicy(), host="login", user="alice", stdout=stdout, stderr=b"")


def test_regular_uid_after_login_is_accepted() -> None:
    check_login_uid(IdentityPolicy(), host="login", user="alice", stdout=b"1000\n", stderr=b"")
