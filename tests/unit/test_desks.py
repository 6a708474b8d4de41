"""Few work at a time, and waiting for the outside world does not count."""

from __future__ import annotations

import threading

from clusters.desks import Desks


def test_no_more_than_the_desks_work_at_a_time() -> None:
    desks = Desks(2)
    at_work, most, lock, go = 0, 0, threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal at_work, most
        with desks.at_work():
            with lock:
                at_work += 1
                most = max(most, at_work)
            go.wait(0.02)
            with lock:
                at_work -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == 2


def test_who_steps_aside_leaves_the_desk_and_gets_one_back() -> None:
    desks = Desks(1)
    aside, back, other_was_there = threading.Event(), threading.Event(), threading.Event()

    def waits() -> None:
        with desks.at_work(), desks.stepped_aside():
            aside.set()
            back.wait(20)

    thread = threading.Thread(target=waits)
    thread.start()
    assert aside.wait(20)
    with desks.at_work():
        other_was_there.set()
        back.set()
        # It wants its desk back, which is ours until we are done.
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(20)
    assert not thread.is_alive()
    assert other_was_there.is_set()


def test_without_a_desk_there_is_nothing_to_leave() -> None:
    desks = Desks(1)
    with desks.stepped_aside(), desks.at_work():
        pass
    with desks.at_work():
        pass
