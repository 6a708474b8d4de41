"""Embedded cluster code that needs no cluster: package sources, processes, directories, environment."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from devtools.embedded_cluster.console import ClusterSetupError, build_clean_environment
from devtools.embedded_cluster.layout import Layout, check_directory
from devtools.embedded_cluster.processes import Process, find_process
from devtools.embedded_cluster.sources import PackageSource, read_machine_sources


def test_one_line_and_deb822_sources_are_parsed(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://off.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://a.example/debian bookworm main contrib # own\n"
        "deb-src http://a.example/debian bookworm main\n"
    )
    (tmp_path / "sources.list.d/x.sources").write_text(
        "Types: deb\n# a comment\nURIs: http://b.example/debian http://c.example/debian\n"
        "Suites: bookworm bookworm-updates\nComponents: main\nSigned-By: /b.gpg\n"
        "\n"
        "Types: deb\nEnabled: no\nURIs: http://d.example\nSuites: s\nComponents: main\n"
        "\n"
        "Types: deb\nURIs: http://e.example\nSuites: s\nComponents: main\nSigned-By:\n"
        " -----BEGIN PGP PUBLIC KEY BLOCK-----\n"
    )
    (tmp_path / "sources.list.d/y.list.disabled").write_text("deb http://f.example s main\n")
    suites = ("bookworm", "bookworm-updates")
    assert read_machine_sources(tmp_path) == [
        PackageSource("http://a.example/debian", ("bookworm",), ("main", "contrib"), "/k.gpg"),
        PackageSource("http://b.example/debian", suites, ("main",), "/b.gpg"),
        PackageSource("http://c.example/debian", suites, ("main",), "/b.gpg"),
        PackageSource("http://e.example", ("s",), ("main",), ""),
    ]


def test_reused_pid_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        real = find_process(child.pid)
        assert real is not None
        stale = Process(real.pid, real.start_ticks - 1)
        assert not stale.is_alive()
        stale.send_signal(signal.SIGKILL)
        assert stale.stop(stop_timeout_s=0.1)
        assert child.poll() is None
        real.send_signal(signal.SIGKILL)
        assert real.wait(5)
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    "path", ["/var/lib/" + "x" * 80, "/var/lib/a b", "/var/lib/a#b", "/var/lib/a,b"]
)
def test_path_unusable_for_sockets_or_slurm_is_rejected(path: str) -> None:
    with pytest.raises(ClusterSetupError):
        check_directory(Layout(Path(path)))


def test_caller_environment_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "MYSQL_UNIX_PORT", "LD_PRELOAD", "PYTHONPATH"):
        monkeypatch.setenv(name, "/elsewhere")
    assert "/elsewhere" not in build_clean_environment().values()
    assert build_clean_environment({"SLURM_CONF": "/mine"})["SLURM_CONF"] == "/mine"
    assert os.environ["SLURM_CONF"] == "/elsewhere"
