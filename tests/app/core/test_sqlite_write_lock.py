"""The write lock of the SQLite backend serializes writers and is always released."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, connections, transaction

from clusters.models import ResourceSpec
from core.sqlite import base

pytestmark = pytest.mark.django_db(transaction=True)


def write(name: str) -> None:
    try:
        with transaction.atomic():
            ResourceSpec.objects.create(name=name, title=name, cpus=1, mem_mib=1)
    finally:
        connections.close_all()


def test_concurrent_writers_all_commit() -> None:
    writers = [threading.Thread(target=write, args=(f"size-{n}",)) for n in range(20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert ResourceSpec.objects.filter(name__startswith="size-").count() == 20
    assert not base._write_lock.locked()


def test_failed_transaction_releases_write_lock() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        raise RuntimeError("in the middle")
    assert not base._write_lock.locked()
    write("after")
    assert ResourceSpec.objects.filter(name="after").exists()


def test_closed_connection_releases_write_lock() -> None:
    def close_during_transaction() -> None:
        connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
        connection.close()

    thread = threading.Thread(target=close_during_transaction)
    thread.start()
    thread.join(10)
    assert not base._write_lock.locked()


def test_nested_transaction_does_not_deadlock() -> None:
    with transaction.atomic(), transaction.atomic():
        ResourceSpec.objects.create(name="inner", title="inner", cpus=1, mem_mib=1)
    assert ResourceSpec.objects.filter(name="inner").exists()
