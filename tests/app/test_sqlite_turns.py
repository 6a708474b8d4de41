"""Writers of one process take turns on SQLite, and nobody keeps a turn for ever."""

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


def test_many_writers_at_once_all_get_through() -> None:
    writers = [threading.Thread(target=write, args=(f"size-{n}",)) for n in range(20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert ResourceSpec.objects.filter(name__startswith="size-").count() == 20
    assert not base._turn.locked()


def test_a_failed_transaction_gives_its_turn_back() -> None:
    with pytest.raises(RuntimeError), transaction.atomic():
        raise RuntimeError("in the middle")
    assert not base._turn.locked()
    write("after")
    assert ResourceSpec.objects.filter(name="after").exists()


def test_a_connection_that_is_closed_gives_its_turn_back() -> None:
    def leave_in_the_middle() -> None:
        connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
        connection.close()

    thread = threading.Thread(target=leave_in_the_middle)
    thread.start()
    thread.join(10)
    assert not base._turn.locked()


def test_a_transaction_inside_another_does_not_wait_for_itself() -> None:
    with transaction.atomic(), transaction.atomic():
        ResourceSpec.objects.create(name="inner", title="inner", cpus=1, mem_mib=1)
    assert ResourceSpec.objects.filter(name="inner").exists()
