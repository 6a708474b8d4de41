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

ADDRESS_VARIABLES = {
    "horovod": ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT"),
}
WAIT_S = 300  # the image of the first task may be slow to read


class Slot:
    """One process of Horovod. Its attributes are those of Horovod's own SlotInfo, whose module changed between versions."""

    def __init__(self, rank, size):
        self.hostname = "task-{}".format(rank)
        self.rank = self.cross_rank = rank
        self.size = self.cross_size = size
        self.local_rank, self.local_size = 0, 1


def start_horovod():
    try:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError:  # before 0.21
        from horovod.run.http.http_server import RendezvousHandler, RendezvousHTTPServer
    port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    size = int(os.environ["HOROVOD_SIZE"])
    server = RendezvousHTTPServer(("", port), RendezvousHandler, 0)
    slots = [Slot(rank, size) for rank in range(size)]
    if hasattr(server, "init"):
        server.init(slots)
    else:  # before 0.20
        server.extract_scope_size(slots)
    return server.serve_forever


def start_xgboost():
    from xgboost.tracker import RabitTracker

    options = {
        "n_workers": int(os.environ["DMLC_NUM_WORKER"]),
        "host_ip": os.environ["DMLC_TRACKER_URI"],
        "port": int(os.environ["DMLC_TRACKER_PORT"]),
        "sortby": "task",  # ranks are in the order of DMLC_TASK_ID
    }
    tracker = RabitTracker(**options)
    if hasattr(tracker, "wait_for"):
        tracker.start()
        return tracker.wait_for
    tracker.start(options["n_workers"])  # before 2.1
    return tracker.join


def run_server(name, ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # tasks may need it while they save
    os.dup2(2, 1)  # the caller reads standard output until it is closed
    run = {"horovod": start_horovod, "xgboost": start_xgboost}[name]()
    os.write(ready, b"1")
    os.close(ready)
    run()


def wait_for_server(name):
    host, port = ADDRESS_VARIABLES[name]
    address = os.environ[host], int(os.environ[port])
    if name == "xgboost":
        from xgboost.tracker import RabitTracker

        if not hasattr(RabitTracker, "wait_for"):
            return 0  # before 2.1, a connection without a message ends the tracker; workers try again by themselves
    deadline = time.time() + WAIT_S
    while time.time() < deadline:
        try:
            socket.create_connection(address, timeout=10).close()
            return 0
        except OSError:
            time.sleep(0.2)
    sys.stderr.write("%s does not answer at %s:%s\n" % ((name,) + address))
    return 1


def main():
    if sys.argv[1].startswith("wait-"):
        return wait_for_server(sys.argv[1][len("wait-") :])
    ready_end, report_end = os.pipe()
    # The server may use threads, which a fork does not copy: fork first.
    child = os.fork()
    if child == 0:
        os.close(ready_end)
        try:
            run_server(sys.argv[1], report_end)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(report_end)
    if not os.read(ready_end, 1):
        return 1
    print(child)
    return 0


if __name__ == "__main__":
    sys.exit(main())
