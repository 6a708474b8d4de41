"""The host key rule: only pinned keys are trusted, and their algorithms are requested first."""

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


def test_a_pinned_key_is_trusted_whatever_its_comment() -> None:
    check([f"ssh-ed25519 {OTHER}", f"ssh-ed25519 {KEY} root@login"])


@pytest.mark.parametrize(
    ("pinned_lines", "text"),
    [([], "No host key is pinned"), ([f"ssh-ed25519 {OTHER}"], "not the pinned one")],
)
def test_another_key_is_refused_with_its_fingerprint(pinned_lines: list[str], text: str) -> None:
    with pytest.raises(HostKeyMismatch, match=text) as caught:
        check(pinned_lines)
    assert host_key_fingerprint(KEY) in caught.value.user_message
    assert KEY in caught.value.user_message


def test_the_key_type_must_match_too() -> None:
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
def test_the_uid_after_login_is_checked(stdout: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_login_uid(IdentityPolicy(), host="login", user="alice", stdout=stdout, stderr=b"")


def test_an_ordinary_uid_is_accepted() -> None:
    check_login_uid(IdentityPolicy(), host="login", user="alice", stdout=b"1000\n", stderr=b"")
