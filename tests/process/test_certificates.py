"""The CA key file, and certificates verified with a different library from the one that writes them."""

from __future__ import annotations

import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

from clusters.transport.certificates import CaKeyUnusable, CertificateAuthority


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca" / "key")


def test_first_use_creates_a_private_key_in_a_private_directory(
    authority: CertificateAuthority,
) -> None:
    line = authority.public_key_line()
    assert line.startswith("ssh-ed25519 AAAA")
    assert stat.S_IMODE(authority.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in authority.path.parent.iterdir()] == ["key"]
    assert CertificateAuthority(authority.path).public_key_line() == line


def test_concurrent_first_uses_create_one_key(tmp_path: Path) -> None:
    path = tmp_path / "ca" / "key"
    with ThreadPoolExecutor(16) as threads:
        lines = set(
            threads.map(
                lambda _: CertificateAuthority(path).public_key_line(), range(64), timeout=30
            )
        )
    assert len(lines) == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_certificate_has_one_principal_and_short_validity(authority: CertificateAuthority) -> None:
    before = time.time()
    signed = authority.sign("alice", valid_s=600)
    certificate = load_ssh_public_identity(signed.certificate.encode())
    assert isinstance(certificate, SSHCertificate)
    certificate.verify_cert_signature()
    assert certificate.type is SSHCertificateType.USER
    assert certificate.valid_principals == [b"alice"]
    assert certificate.key_id == b"sluice:alice"
    assert before - 200 < certificate.valid_after < before
    assert before + 595 < certificate.valid_before < before + 605
    assert certificate.critical_options == {}
    assert certificate.extensions == {}
    tunnel = load_ssh_public_identity(
        authority.sign("alice", allow_tunnel=True).certificate.encode()
    )
    assert isinstance(tunnel, SSHCertificate)
    assert set(tunnel.extensions) == {b"permit-port-forwarding"}


def test_every_certificate_has_its_own_key(authority: CertificateAuthority) -> None:
    first, second = authority.sign("alice"), authority.sign("alice")
    assert first.private_key != second.private_key
    assert first.certificate != second.certificate


def test_openssh_reads_key_and_certificate(authority: CertificateAuthority, tmp_path: Path) -> None:
    signed = authority.sign("alice")
    (tmp_path / "id-cert.pub").write_text(signed.certificate)
    shown = subprocess.run(
        ["ssh-keygen", "-L", "-f", str(tmp_path / "id-cert.pub")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "user certificate" in shown
    assert 'Key ID: "sluice:alice"' in shown
    public = subprocess.run(
        ["ssh-keygen", "-y", "-f", str(authority.path)], capture_output=True, text=True, check=True
    ).stdout
    assert public.split()[:2] == authority.public_key_line().split()[:2]


@pytest.mark.parametrize(("mode", "name"), [(0o640, "key"), (0o604, "key"), (0o777, ".")])
def test_key_accessible_to_others_is_rejected_with_remedy(
    authority: CertificateAuthority, mode: int, name: str
) -> None:
    authority.public_key_line()
    (authority.path.parent / name).chmod(mode)
    with pytest.raises(CaKeyUnusable, match=r"run chmod (0600|go-w)"):
        CertificateAuthority(authority.path).sign("alice")


def test_file_that_is_not_a_key_is_not_overwritten(authority: CertificateAuthority) -> None:
    authority.path.parent.mkdir(mode=0o700)
    authority.path.write_text("precious")
    authority.path.chmod(0o600)
    with pytest.raises(CaKeyUnusable, match="not an unencrypted OpenSSH private key"):
        authority.sign("alice")
    assert authority.path.read_text() == "precious"
