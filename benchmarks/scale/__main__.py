"""A large cluster with simulated users, once with selasticd acting and once without it.

    python -m benchmarks.scale [--nodes 256] [--jobs 2000] [--minutes 15] [--seed 1] [--users 4]
                               [--only with|without] [--out scale-results] [--cluster scale]

Many slurmd run in one container. Simulated users keep so many jobs queued and running (three of
five elastic), and submit, cancel, hold, update and look at them, at times drawn from the seed.
Writes `with.json` and `without.json`, and from both `scale.json` and `scale.png`. Runs can be made
one by one (`--only`). The benchmark's own cluster is removed at the end, also after an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.scale.figures import arm_figures, compared, figure_lines, plot
from benchmarks.support.container_commands import cluster_command, on_cluster
from benchmarks.support.simulated_users import USERS_DIR, SimulatedUsers

ARMS = ("without", "with")
EVERY_S = 3.0
STATE = "/tmp/scale"  # noqa: S108 - in the container
#: As a site would have it; the types' speeds are the emulation's.
CONFIG = f"""\
[controller]
mode = "act"
state_dir = "{STATE}"
[api]
controller = "ctld:7321"
[speedup]
types = {{ a100 = 2.0, v100 = 1.0 }}
"""
#: Users have this long to submit their first jobs, and what runs to end at the end.
FILL_S, END_S = 900.0, 120.0


def main() -> None:
    """Run, compare, print."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for arm in [args.only] if args.only else ARMS:
            result = run(arm, args)
            (args.out / f"{arm}.json").write_text(json.dumps(result))
    except KeyboardInterrupt:
        sys.exit("benchmarks: interrupted; the cluster is removed")
    files = {a: args.out / f"{a}.json" for a in ARMS}
    rows = {a: json.loads(f.read_text()) for a, f in files.items() if f.exists()}
    figures = {a: arm_figures(row) for a, row in rows.items()}
    both = compared(rows, figures) if len(rows) == len(ARMS) else {}
    whole = {"arms": figures, "compared": both}
    (args.out / "scale.json").write_text(json.dumps(whole, indent=2))
    plot(rows, args.out / "scale.png")
    print("\n".join(figure_lines(whole)))


def run(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run once, on a separate cluster.

    Returns:
        `rows` of daemon_monitor.py, `did` (actions of users), `log` of selasticd (its lines of
        rounds and transitions), `attempts` of jobs, and the parameters of the run.
    """
    up = [*cluster_command(args.cluster), "up", "--farm", str(args.nodes)]
    _say(f"{arm}: a cluster of {args.nodes} nodes")
    try:
        subprocess.run(up, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with SimulatedUsers(args.cluster, users=args.users) as users:
            if arm == "with":
                _start(args.cluster)
                users.report(deaf=0.0)
            return _measured(arm, users, args)
    finally:
        down = [*cluster_command(args.cluster), "down"]
        subprocess.run(down, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _measured(arm: str, users: SimulatedUsers, args: argparse.Namespace) -> dict[str, Any]:
    users_at_work = users.start_users(seed=args.seed, jobs=args.jobs, selastic=arm == "with")
    _until_full(users_at_work, args)
    began = time.time()
    until = began + args.minutes * 60
    rows: list[dict[str, Any]] = []
    with _watch(args.cluster, rows) as stop:
        users_at_work.act_until(until)
        while time.time() < until:
            time.sleep(5)
            _say(f"{arm}: {_progress(rows, users_at_work, until)}")
        stop()
    users_at_work.wait(END_S)
    log = on_cluster(args.cluster, "sh", "-c", f"cat {STATE}/log 2>/dev/null || true")
    kept = [line for line in log.splitlines() if "Round" in line or "Transition=" in line]
    noise = [line for line in log.splitlines() if " error: " in line or " warning: " in line]
    return {
        "arm": arm,
        "nodes": args.nodes,
        "jobs": args.jobs,
        "minutes": args.minutes,
        "seed": args.seed,
        "users": args.users,
        "began": began,
        "until": until,
        "rows": rows,
        "did": users_at_work.rows,
        "log": kept,
        "warnings": Counter(_kind(line) for line in noise),
        "attempts": users.attempts(),
    }


def _start(cluster: str) -> None:
    """Start selasticd with verbose logging (-v)."""
    on_cluster(cluster, "install", "-d", "-o", "selastic", "-m", "755", STATE)
    on_cluster(cluster, "tee", f"{STATE}/elastic.toml", stdin=CONFIG)
    run_ = (
        "cd /; export MALLOC_ARENA_MAX=2; "  # as its unit does
        f"exec selasticd -v -D --config {STATE}/elastic.toml </dev/null >{STATE}/log 2>&1"
    )
    on_cluster(cluster, "sh", "-c", f"({run_}) & sleep 2", user="selastic")
    text = on_cluster(cluster, "sh", "-c", f"cat {STATE}/log")
    if "Mode=act" not in text:
        sys.exit(f"benchmarks: selasticd did not start: {text[-400:]}")


def _until_full(users_at_work: Any, args: argparse.Namespace) -> None:
    """Wait until the jobs of all users are submitted."""
    end = time.time() + FILL_S
    while not users_at_work.all_submitted():
        if time.time() > end:
            sys.exit("benchmarks: the queue could not be filled")
        time.sleep(3)
        _say(f"{users_at_work.count('sbatch')} of {args.jobs} jobs submitted")
    time.sleep(10)  # what can start has started


@contextlib.contextmanager
def _watch(cluster: str, rows: list[dict[str, Any]]) -> Iterator[Any]:
    """Sample the daemons during the context, and once more at its end."""
    words = [
        "/opt/slurm-elastic/bin/python",
        f"{USERS_DIR}/daemon_monitor.py",
        "--every",
        str(EVERY_S),
    ]
    words += ["--ledger", f"{STATE}/ledger.sqlite"]
    process = subprocess.Popen(
        [*cluster_command(cluster), "exec", "--", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = process.stdout
    reader = threading.Thread(target=lambda: rows.extend(map(json.loads, lines)), daemon=True)
    reader.start()

    def stop() -> None:
        _close(process)
        reader.join(60)

    try:
        yield stop
    finally:
        process.kill()
        process.wait()


def _close(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _progress(rows: list[dict[str, Any]], users_at_work: Any, until: float) -> str:
    left = max(0.0, until - time.time())
    last = rows[-1] if rows else {}
    daemon = last.get("selasticd")
    memory = f", selasticd {daemon['rss_mb']:.0f} MB" if daemon else ""
    return f"{left:.0f} s left, {len(users_at_work.rows)} things done{memory}"


def _kind(line: str) -> str:
    """Return a line of the log without its numbers, so that equal kinds are counted together."""
    words = line.split(": ", 1)[-1].split()
    return " ".join(w.split("=")[0] if "=" in w else w for w in words)[:120]


def _say(text: str) -> None:
    """Show one redrawn line on a terminal, plain lines elsewhere."""
    end = "" if sys.stderr.isatty() else "\n"
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{start}{text}", end=end, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--nodes", type=int, default=256, help="8 GPUs each above 64 nodes, else 4")
    parser.add_argument("--jobs", type=int, default=2000, help="queued and running")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument("--only", choices=ARMS)
    parser.add_argument("--out", type=Path, default=Path("scale-results"))
    parser.add_argument("--cluster", default="scale", help="its name; it is removed at the end")
    args = parser.parse_args()
    if args.minutes <= 0 or args.jobs < 1 or not 1 <= args.users <= 20:
        parser.error("--minutes and --jobs must be positive, --users from 1 to 20")
    return args


if __name__ == "__main__":
    main()
