#!/usr/bin/env python3
"""Training script that saves and loads its own checkpoints, without the library.

    saver.py MANNER HOME STEPS [PACE]

MANNER is how checkpoints are written to HOME/saves: `rename` (a temporary file, renamed; also on
USR2), `place` (one file, overwritten), `folder` (a directory of three files for each, with pauses
between them), `anew` (as `place`, and never read: each start begins at step 0).

Rank 0 appends a row of JSON to HOME/log, the job's output, for each start, step and save; so the
rows are in one order with the lines of esrun. HOME/done is created when all steps are done.
PACE, default 1, multiplies the seconds of steps and saves.
"""

import json
import os
import shutil
import signal
import sys
import time
import uuid
from pathlib import Path

manner, home, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
rank, run = int(os.environ["RANK"]), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
saves = home / "saves"
pace = float((*sys.argv, "1")[4])
#: Steps between two saves; seconds of a step, and of a pause inside a save.
EVERY, STEP_S, PAUSE_S = 10, 0.2 * pace, 0.3 * pace
FILES = ("model.json", "optimizer.json", "state.json")
KEEP = 3
identity = uuid.uuid4().hex[:8]
signals: list[int] = []


def note(**row: object) -> None:
    """Append a row, in one write."""
    line = json.dumps({"attempt": identity, "at": round(time.time(), 2), **row}) + "\n"
    descriptor = os.open(home / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def write(path: Path, step: int) -> None:
    """Write a file in two parts; the row follows its first byte."""
    text = json.dumps({"step": step, "weights": "w" * 20000, "end": step})
    with path.open("w") as file:
        file.write(text[: len(text) // 2])
        file.flush()
        if path.name in (FILES[0], "ckpt.json", "ckpt.json.tmp"):
            note(save=step)
        time.sleep(PAUSE_S)
        file.write(text[len(text) // 2 :])


def save(step: int) -> None:
    if manner == "folder":
        folder = saves / f"step_{step:06d}"
        folder.mkdir(exist_ok=True)
        for name in FILES:
            write(folder / name, step)
        for old in sorted(saves.iterdir())[:-KEEP]:
            shutil.rmtree(old)
    elif manner == "rename":
        write(saves / "ckpt.json.tmp", step)
        (saves / "ckpt.json.tmp").rename(saves / "ckpt.json")
    else:
        write(saves / "ckpt.json", step)
    note(saved=step)


def read(path: Path) -> int:
    """Return the step of a file.

    Raises:
        ValueError: the file is torn.
    """
    body = json.loads(path.read_text())
    if body["step"] != body["end"]:
        raise ValueError("parts of two saves")
    return int(body["step"])


def resume() -> tuple[int, list[int]]:
    """Return the step to begin after, and the steps of torn checkpoints; -1: not known."""
    if manner == "anew":
        return 0, []
    torn = []
    if manner == "folder":
        for folder in sorted(saves.iterdir(), reverse=True):
            try:
                steps = {read(folder / name) for name in FILES}
            except (OSError, ValueError):
                steps = set()
            if steps == {int(folder.name.removeprefix("step_"))}:
                return steps.pop(), torn
            torn.append(int(folder.name.removeprefix("step_")))
        return 0, torn
    try:
        return read(saves / "ckpt.json"), []
    except FileNotFoundError:
        return 0, []
    except ValueError:
        return 0, [-1]


def main() -> None:
    if manner == "rename":  # esrun signals all ranks
        signal.signal(signal.SIGUSR2, lambda number, _: signals.append(number))
    while rank:  # works along
        if (home / "done").exists():
            return
        time.sleep(STEP_S)
    saves.mkdir(exist_ok=True)
    step, torn = resume()
    world = int(os.environ["WORLD_SIZE"])
    note(start=step, run=run, world=world, torn=torn)
    while step < last:
        time.sleep(STEP_S)
        step += 1
        note(step=step)
        if step % EVERY == 0 or signals:
            signals.clear()
            save(step)
    note(finished=step)
    (home / "done").write_text("done\n")


main()
