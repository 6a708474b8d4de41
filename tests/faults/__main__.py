"""`scripts/faults`: injects faults into a private Sluice installation and prints faults and findings."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.campaign import FAULTS, Campaign, CampaignReport
from tests.faults.soak import soak
from tests.faults.system import SystemUnderTest

DEFAULT_CLUSTER_DIR = "/var/lib/sluice/faults-cluster"


def print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="random seed of the order and timing of faults (default 1)",
    )
    parser.add_argument("--faults", type=int, default=36, help="number of faults (default 36)")
    parser.add_argument(
        "--minutes", type=float, default=60, help="inject no new fault after this time (default 60)"
    )
    parser.add_argument(
        "--longest",
        type=float,
        default=60,
        metavar="S",
        help="maximum duration of a fault in seconds (default 60)",
    )
    parser.add_argument("--jobs", type=int, default=6, help="jobs per fault (default 6)")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="only faults whose name contains TEXT"
    )
    parser.add_argument(
        "--soak", action="store_true", help="no faults: run many short jobs and check for leaks"
    )
    parser.add_argument(
        "--soak-jobs", type=int, default=1000, help="number of jobs of --soak (default 1000)"
    )
    parser.add_argument("--cluster-dir", default=DEFAULT_CLUSTER_DIR)
    options = parser.parse_args()
    # Exit through `finally` on a signal, so that no process is left running.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="sluice-faults-") as home:
        print_line("Starting a private Sluice and embedded cluster …")
        system = SystemUnderTest(Path(options.cluster_dir), Path(home))
        try:
            system.start()
            report = run_soak(system, options) if options.soak else run_faults(system, options)
            if report.findings:
                log_copy = Path(f"{tempfile.gettempdir()}/sluice-faults-{int(time.time())}.log")
                log_copy.write_text(system.logs(200_000))
                print_line(f"The logs of web and engines are in {log_copy}.")
        finally:
            system.close()
            system.daemons.down()
    return 1 if report.findings else 0


def run_faults(system: SystemUnderTest, options: argparse.Namespace) -> CampaignReport:
    chosen = tuple(fault for fault in FAULTS if options.only in fault.name)
    campaign = Campaign(
        system,
        seed=options.seed,
        max_duration_s=options.longest,
        jobs_per_round=options.jobs,
        faults=chosen,
        print_line=print_line,
    )
    report = campaign.run(faults=options.faults, minutes=options.minutes)
    print_line(
        f"\nseed {options.seed}: {len(report.injected)} faults of {len(set(report.injected))} kinds, "
        f"{report.jobs} jobs, {len(report.findings)} findings"
    )
    for finding in report.findings:
        print_line(f"  {finding}")
    return report


def run_soak(system: SystemUnderTest, options: argparse.Namespace) -> CampaignReport:
    report = CampaignReport()
    report.findings = soak(
        system,
        jobs=options.soak_jobs,
        minutes=options.minutes,
        print_line=print_line,
    )
    print_line(f"\nsoak: {len(report.findings)} findings")
    for finding in report.findings:
        print_line(f"  {finding}")
    return report


if __name__ == "__main__":
    sys.exit(main())
