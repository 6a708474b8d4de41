"""Starts the server by which the tasks of a framework find each other, in the container of the job's first task.

Usage: framework_server.py horovod|xgboost, run by enter.sh with the Python and the framework of the image, so it uses
Python 3.6 and the standard library only. It prints the process id of the server when the server listens, and ends;
the server runs until enter.sh kills it. The address, the port and the number of tasks come from the task's variables.
Usage in the other tasks: framework_server.py wait-horovod|wait-xgboost. It ends when the server listens.
"""

import os
import signal
import socket
import sys
import time
import traceback
from importlib import import_module
from typing import Any, Callable

ADDRESS_VARIABLES = {
    "horovod": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT"),
}
WAIT_S = 300  # the image of the first task may be slow to read


class Slot:
    """One process of Horovod, with the attributes of Horovod's own SlotInfo, whose module changed between versions."""

    def __init__(self, rank: int, size: int) -> None:
        self.hostname = f"task-{rank}"
        self.rank = self.cross_rank = rank
        self.size = self.cross_size = size
        self.local_rank, self.local_size = 0, 1


def find_address(name: str) -> Any:
    host, port = ADDRESS_VARIABLES[name]
    return os.environ[host], int(os.environ[port])


def start_horovod() -> Callable[[], None]:
    try:
        http_server = import_module("horovod.runner.http.http_server")
    except ImportError:  # before 0.21
        http_server = import_module("horovod.run.http.http_server")
    size = int(os.environ["HOROVOD_SIZE"])
    address = "", find_address("horovod")[1]
    server = http_server.RendezvousHTTPServer(address, http_server.RendezvousHandler, 0)
    slots = [Slot(rank, size) for rank in range(size)]
    if hasattr(server, "init"):
        server.init(slots)
    else:  # before 0.20
        server.extract_scope_size(slots)
    serve: Callable[[], None] = server.serve_forever
    return serve


def start_xgboost() -> Callable[[], None]:
    workers = int(os.environ["DMLC_NUM_WORKER"])
    host, port = find_address("xgboost")
    # Sorted by task: ranks are in the order of DMLC_TASK_ID.
    create_tracker = import_module("xgboost.tracker").RabitTracker
    tracker = create_tracker(n_workers=workers, host_ip=host, port=port, sortby="task")
    wait: Callable[[], None]
    if hasattr(tracker, "wait_for"):
        tracker.start()
        wait = tracker.wait_for
    else:  # before 2.1
        tracker.start(workers)
        wait = tracker.join
    return wait


def run_server(name: str, ready: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # tasks may need it while they save
    os.dup2(2, 1)  # the caller reads standard output until it is closed
    run = {"horovod": start_horovod, "xgboost": start_xgboost}[name]()
    os.write(ready, b"1")
    os.close(ready)
    run()


def start_server(name: str) -> int:
    ready_end, report_end = os.pipe()
    # The server may use threads, which a fork does not copy: fork first.
    child = os.fork()
    if child == 0:
        os.close(ready_end)
        try:
            run_server(name, report_end)
        except Exception:  # noqa: BLE001 - the framework's; its text goes to the task's log
            traceback.print_exc()
        os._exit(1)
    os.close(report_end)
    if not os.read(ready_end, 1):
        return 1
    sys.stdout.write(str(child))
    return 0


def wait_for_server(name: str) -> int:
    if name == "xgboost":
        tracker = import_module("xgboost.tracker").RabitTracker
        if not hasattr(tracker, "wait_for"):
            return 0  # before 2.1, a connection without a message ends the tracker; workers try again by themselves
    address = find_address(name)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=10).close()
            return 0
        except OSError:
            time.sleep(0.2)
    sys.stderr.write(f"{name} does not answer at {address[0]}:{address[1]}\n")
    return 1


def main(name: str) -> int:
    if name.startswith("wait-"):
        return wait_for_server(name[len("wait-") :])
    return start_server(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
