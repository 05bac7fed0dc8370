"""Monitor of slurmctld and selasticd; runs in ctld as root, prints one JSON object per sample.

    daemon_monitor.py --every SECONDS --ledger FILE

CPU seconds and memory from /proc, the ledger's size with what WAL adds to it, and every tenth
time all counters of sdiag. It ends when its standard input is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

#: Counters of sdiag that are printed.
KEPT = (
    *("jobs_submitted", "jobs_started", "jobs_completed", "jobs_canceled"),
    *("jobs_pending", "jobs_running", "schedule_cycle_sum", "schedule_cycle_total"),
    *("bf_cycle_sum", "bf_cycle_counter"),
)
TICK = os.sysconf("SC_CLK_TCK")
DAEMONS = {"slurmctld": ("slurmctld",), "selasticd": ("/selasticd",)}


def find(marks: tuple[str, ...]) -> int | None:
    """Return the process whose first two words contain one of these."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")[:2]
            except OSError:
                continue
            text = " ".join(w.decode(errors="replace") for w in words)
            if any(m in text for m in marks) and not text.startswith(("sh ", "bash ", "runuser")):
                return int(entry.name)
    return None


def process(pid: int) -> dict[str, float] | None:
    """Return CPU seconds, resident memory in MB and threads; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    rss = next((line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")), "0")
    return {
        "cpu_s": (int(fields[11]) + int(fields[12])) / TICK,
        "rss_mb": int(rss) / 1024,
        "threads": int(fields[17]),
    }


def size(path: Path) -> int:
    """Return a file's bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sdiag() -> dict[str, object]:
    """Return slurmctld's counters."""
    done = subprocess.run(["sdiag", "--json"], capture_output=True, check=False)
    try:
        statistics = json.loads(done.stdout)["statistics"]
    except (ValueError, KeyError):
        return {}
    kinds = {
        r["message_type"]: [r["count"], r["total_time"]] for r in statistics["rpcs_by_message_type"]
    }
    users = {r["user"]: [r["count"], r["total_time"]] for r in statistics["rpcs_by_user"]}
    return {**{k: statistics.get(k) for k in KEPT}, "by_type": kinds, "by_user": users}


def main() -> None:
    """Print samples until standard input is closed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=float, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    args = parser.parse_args()
    pids: dict[str, int | None] = {}
    samples = 0
    while True:
        row: dict[str, object] = {"t": time.time(), "load": os.getloadavg()[0]}
        for name, marks in DAEMONS.items():
            pid = pids.get(name)
            usage = process(pid) if pid else None
            if usage is None:
                pids[name] = find(marks)
                usage = process(pids[name] or 0) if pids[name] else None
            if usage:
                row[name] = usage
        wal = args.ledger.with_name(args.ledger.name + "-wal")
        row["ledger"] = [size(args.ledger), size(wal)]
        if samples % 10 == 0:
            row["sdiag"] = sdiag()
        samples += 1
        print(json.dumps(row), flush=True)
        if select.select([sys.stdin], [], [], args.every)[0] and not sys.stdin.read(1):
            print(json.dumps({"t": time.time(), "sdiag": sdiag()}), flush=True)
            return


if __name__ == "__main__":
    main()
