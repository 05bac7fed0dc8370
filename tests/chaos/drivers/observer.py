"""Prints Slurm's state, one line of JSON about every second; runs in ctld as root.

    observer.py HOME [nodes]

Asks slurmctld by its own commands alone. While it does not answer, `jobs` is null. With `nodes`
also for the states of nodes; otherwise they are null.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from slurm_elastic.core.nodelist import expand

ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE",
         "OUT_OF_MEMORY", "PREEMPTED"}  # fmt: skip


def ask(*words: str) -> dict | None:
    try:
        done = subprocess.run([*words, "--json"], capture_output=True, timeout=30, check=False)
        answer = json.loads(done.stdout.decode(errors="surrogateescape"))
    except (subprocess.TimeoutExpired, ValueError):
        return None
    # Of a slurmctld that dies while it is asked, scontrol makes an empty list and exit code 0.
    complete = not done.returncode and answer["last_update"]["number"]
    return answer if complete else None


def gpus(text: str) -> int:
    """Return the GPUs of `cpu=4,gres/gpu=4,gres/gpu:v100=4`."""
    counts = dict(item.split("=", 1) for item in text.split(",") if "=" in item)
    return int(counts.get("gres/gpu", 0))


def indices(text: str) -> list[int]:
    """Return the indices of `gpu:v100:2(IDX:0,2-3)`."""
    numbers: list[int] = []
    inner = text.partition("IDX:")[2].rstrip(")")
    for part in inner.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            numbers += range(int(low), int(high or low) + 1)
    return numbers


def job(raw: dict) -> dict:
    states = raw["job_state"]
    running = "RUNNING" in states
    nodes = expand(raw.get("nodes") or "") if running else ()
    details = raw.get("gres_detail") or [] if running else []
    return {
        "id": raw["job_id"],
        "name": raw["name"],
        "state": states[0],
        "flags": states[1:],
        "ended": bool(ENDED & set(states)),
        "reason": raw["state_reason"],
        "comment": raw.get("comment") or "",
        "description": raw.get("state_description") or "",
        "priority": raw["priority"].get("number") or 0,
        "nice": raw["nice"],
        "required": list(expand(raw.get("required_nodes") or "")),
        "excluded": list(expand(raw.get("excluded_nodes") or "")),
        "reservation": raw.get("resv_name") or "",
        "restarts": raw["restart_cnt"],
        "asked": gpus(raw.get("tres_req_str") or ""),
        "held": {n: indices(d) for n, d in zip(nodes, details, strict=False)},
    }


def selasticd(home: Path) -> dict:
    """Return whether selasticd runs, and the length of its log."""
    try:
        alive = Path("/proc", (home / "pid").read_text().strip(), "cmdline").read_bytes()
        return {"alive": bool(alive), "log": (home / "log").stat().st_size}
    except OSError:
        return {"alive": False, "log": 0}


while True:
    begun = time.time()
    jobs = ask("scontrol", "show", "job", "-d")
    found = ask("scontrol", "show", "res") if jobs else None
    nodes = ask("scontrol", "show", "node") if jobs and "nodes" in sys.argv else None
    line = {"at": time.time(), "jobs": None, "reservations": None, "nodes": None}
    line |= selasticd(Path(sys.argv[1]))
    if jobs is not None and found is not None:
        line["jobs"] = [job(raw) for raw in jobs["jobs"]]
        line["reservations"] = {
            r["name"]: r["end_time"]["number"] for r in found.get("reservations", [])
        }
    if nodes is not None:
        line["nodes"] = {n["name"]: n["state"] for n in nodes["nodes"]}
    print(json.dumps(line), flush=True)
    time.sleep(max(0.2, begun + 1 - time.time()))
