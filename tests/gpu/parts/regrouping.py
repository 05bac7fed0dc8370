"""Ranks that join and leave a training while it runs, and what that rests on.

First torch alone, without the library: it answers what NCCL does. While all ranks reduce gradients,
a thread of each forms a second group of the same ranks. Then they use it, keep the old one, and
the last rank ends without a word; the others form a third group.

Then the library (`benchmarks.resize.regroup`): half of the ranks join and leave in turn. On GPUs
that is off by default, and turned on here.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.resize.regroup import (
    LocalRun,
    loss_difference,
    lost_steps,
    measure,
    undisturbed_losses,
    wait,
)
from benchmarks.support.rank_processes import shared_gpus
from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.ranks.nccl_groups import NCCL_VARIABLE
from tests.gpu.part_program import STOPPED, part_main, rank_device, start_ranks, synchronize
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter

#: Steps before the second group is formed, whose times it is compared with.
_STEPS = 40
#: Steps before and after the loss of a rank.
_FEW = 5
_TIMEOUT_S = 60.0
#: Seconds of torch's time-out of heartbeats, and for which ranks train on after a loss: longer than
#: torch waits, with that, before it ends a process in which a collective has failed.
_HEARTBEAT, _SURVIVE_S = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "3"}, 25.0
#: Largest difference of a loss from that of an undisturbed training.
LIMIT = 1e-5
#: How long survivors wait for a rank that has ended.
_LOSS_S = 5.0


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Form groups, and check the sums that they compute."""
    with rows.trial("second group"):
        path = setting.folder / "answer.json"
        elements = 1 << (16 if setting.small else 22 if shared_gpus() else 26)
        start_ranks(setting.ranks, "regrouping", {"path": str(path), "elements": elements})
        answer = json.loads(path.read_text(encoding="utf-8"))
        for name, ok in answer["checks"].items():
            rows.check(name, "yes" if ok else "no", ok=ok, expected="yes")
        for name, (value, unit) in answer["figures"].items():
            rows.measured(name, value, unit)
    os.environ[NCCL_VARIABLE] = "1"
    with rows.trial("library, a rank lost"):
        _lose_companion(rows, setting)
    with rows.trial("ElasticLoop, a rank lost"):
        _lose_companion_of_loop(rows, setting)
    for layout, by in (("init", "library"), ("loop", "ElasticLoop")):
        for millions in (1,) if setting.small or shared_gpus() else (1, 100):
            name = f"{by}, {millions} M parameters"
            with rows.trial(name):
                _join_and_leave(rows, setting, millions, name=name, layout=layout)


def _join_and_leave(
    rows: RowWriter, setting: KitSetting, millions: int, *, name: str, layout: str
) -> None:
    """Let half of the ranks join and leave a training of the library."""
    base = setting.ranks // 2
    changes = 2 if setting.small or shared_gpus() else 10
    figures = measure(millions, changes, base=base, companion=setting.ranks - base, layout=layout)
    lost = figures["lost_steps"]
    rows.check(f"{name}: steps lost or repeated", lost, ok=lost == 0, expected="0")
    off = figures["loss_difference"]
    rows.at_most(f"{name}: largest difference of a loss", off, LIMIT)
    rows.measured(f"{name}: a step, median", figures["step"] * 1e3, "ms")
    for kind in ("grow", "shrink"):
        changed = [row for row in figures["rows"] if row["kind"] == kind]
        for what in ("pause", "request"):
            value = statistics.median(row[what] for row in changed)
            rows.measured(f"{name}: {kind}, {what}, median", value * 1e3, "ms")


def _lose_companion(rows: RowWriter, setting: KitSetting) -> None:
    """Lose a companion's rank: the others continue with the next step."""
    base, name = setting.ranks // 2, "library, a rank lost"
    folder = setting.folder / "lost"
    folder.mkdir()
    with LocalRun(folder / "changed", 1, variables=_HEARTBEAT) as run:
        lost_at = _grow_and_lose(run, base, setting.ranks - base)
        run.wait_for_generation(2)
        run.take_steps(_FEW)
        compared = len(run.steps())
        time.sleep(0 if setting.small else _SURVIVE_S)
        run.take_steps(_FEW)
        codes = run.stop(base)
        steps = run.steps()
    stopped = " ".join([str(STOPPED)] * base)
    ended = " ".join(map(str, codes))
    rows.check(f"{name}: ended by SIGTERM", ended, ok=ended == stopped, expected=stopped)
    lost = lost_steps(steps)
    rows.check(f"{name}: steps lost or repeated", lost, ok=lost == 0, expected="0")
    losses = undisturbed_losses(folder, 1, "init", base, compared)
    off = loss_difference(steps, losses)
    rows.at_most(f"{name}: largest difference of a loss", off, LIMIT)
    times = [row["ended"] for row in steps]
    pause = max(later - earlier for earlier, later in itertools.pairwise(times) if later > lost_at)
    rows.measured(f"{name}: longest time from step to step", pause, "s")


def _lose_companion_of_loop(rows: RowWriter, setting: KitSetting) -> None:
    """Lose a companion's rank within a step of the script: the base's ranks start again."""
    base = setting.ranks // 2
    with LocalRun(setting.folder / "loop", 1, "loop") as run:
        lost_at = _grow_and_lose(run, base, setting.ranks - base)
        ranks = run.processes[:base]
        wait(lambda: all(process.poll() is not None for process in ranks))
        seconds = time.monotonic() - lost_at
    codes = [process.returncode for process in ranks]
    rows.check(
        "ElasticLoop, a rank lost: the others end with the code for another start",
        " ".join(map(str, codes)),
        ok=codes == [RESTART_CODE] * base,
        expected=" ".join([str(RESTART_CODE)] * base),
    )
    rows.measured("ElasticLoop, a rank lost: until the others have ended", seconds, "s")


def _grow_and_lose(run: LocalRun, base: int, companion: int) -> float:
    """Let a companion join, and kill its last rank; return the time of that."""
    port = run.start_base(base)
    run.take_steps(_FEW)
    ranks = run.start_companion(4711, companion, port)
    run.desire({"4711": companion})
    run.wait_for_generation(1)
    run.take_steps(_FEW)
    ranks[-1].kill()
    return time.monotonic()


def rank(options: dict[str, Any]) -> None:
    """Run one rank; rank 0 writes the answer."""
    # Survivors of a lost rank are to go on.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.is_available()
    device = rank_device()
    if gpu:
        torch.cuda.set_device(device)
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, number == 0,
        timeout=timedelta(seconds=_TIMEOUT_S), use_libuv=os.environ.get("USE_LIBUV", "0") == "1",
    )  # fmt: skip
    old = _form(store, "old", number, ranks, device)
    gradients = torch.ones(options["elements"], device=device)
    flag = torch.zeros(1, device=device)

    def step(group: Any, *, formed: bool = False) -> tuple[float, bool]:
        """Reduce once; return the seconds, and whether all ranks have formed the next group."""
        began = time.perf_counter()
        gradients.fill_(number + 1.0)
        flag.fill_(float(formed))
        works = [group.allreduce([tensor]) for tensor in (gradients, flag)]
        for work in works:
            work.wait()
        synchronize(device)
        return time.perf_counter() - began, bool(flag.item() == ranks)

    def right(expected: float) -> bool:
        return bool((gradients == expected).all())

    checks: dict[str, bool] = {}
    figures: dict[str, tuple[float, str]] = {}
    usual = [step(old)[0] for _ in range(_STEPS)][_STEPS // 2 :]
    memory = torch.cuda.mem_get_info(device)[0] if gpu else 0
    formed: dict[str, Any] = {}

    def form() -> None:
        began = time.perf_counter()
        formed["group"] = _form(store, "new", number, ranks, device)
        formed["seconds"] = time.perf_counter() - began

    thread = threading.Thread(target=form, daemon=True)
    thread.start()
    meanwhile, all_formed = [], False
    end = time.monotonic() + _TIMEOUT_S
    while not all_formed and time.monotonic() < end:
        seconds, all_formed = step(old, formed="seconds" in formed)
        meanwhile.append(seconds)
    checks["formed beside the one that trains"] = all_formed
    figures["forming, in a thread"] = formed["seconds"], "s"
    figures["a usual step, median"] = statistics.median(usual) * 1e3, "ms"
    figures["longest step while it was formed"] = max(meanwhile) * 1e3, "ms"
    if gpu:
        free = torch.cuda.mem_get_info(device)[0]
        figures["device memory that it takes"] = (memory - free) / 2**20, "MiB"
    new, total = formed["group"], ranks * (ranks + 1) / 2
    step(new)
    checks["right sums in the new group"] = right(total)
    began = time.perf_counter()
    gradients.fill_(float(number))
    new.broadcast([gradients]).wait()
    synchronize(device)
    seconds = time.perf_counter() - began
    checks["state of rank 0 on all ranks"] = right(0.0)
    figures["state of rank 0 to all"] = 4e-9 * options["elements"] / seconds, "GB/s"
    step(old)
    checks["the old group still works"] = right(total)
    if number == ranks - 1:
        os._exit(0)  # without a word
    seconds = _wait_for_lost(new, gradients)
    figures["a rank lost: found after"] = seconds, "s"
    began = time.perf_counter()
    rest = _form(store, "rest", number, ranks - 1, device)
    gradients = torch.full_like(gradients, number + 1.0)  # the old ones may still be written
    rest.allreduce([gradients]).wait()
    synchronize(device)
    figures["the others: next group and sum after"] = time.perf_counter() - began, "s"
    checks["right sums without the lost rank"] = right(total - ranks)
    if number == 0:
        Path(options["path"]).write_text(json.dumps({"checks": checks, "figures": figures}))
    store.add("ended", 1)
    while number == 0 and store.add("ended", 0) < ranks - 1:
        time.sleep(0.01)
    os._exit(0)  # groups with a lost member cannot be taken down


def _form(store: Any, name: str, number: int, ranks: int, device: Any) -> Any:
    """Return a group of these ranks that has computed a first sum."""
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415

    prefix = distributed.PrefixStore(name, store)
    one = torch.ones(1)
    if device.type == "cpu":
        timeout = timedelta(seconds=_TIMEOUT_S)
        group = distributed.ProcessGroupGloo(prefix, number, ranks, timeout)
        group.allreduce([one]).wait()
        return group
    torch.cuda.set_device(device)  # each thread has one of its own
    options = distributed.ProcessGroupNCCL.Options()
    group = distributed.ProcessGroupNCCL(prefix, number, ranks, options)
    # On the training's stream it would wait for a sum of the training, in another order elsewhere.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        one = one.to(device)
        work = group.allreduce([one])
    while not work.is_completed():
        time.sleep(0.001)
    return group


def _wait_for_lost(group: Any, gradients: Any) -> float:
    """Reduce with a rank that has ended; return the seconds until that is known."""
    began = time.perf_counter()
    try:
        work = group.allreduce([gradients])
        while not work.is_completed() and time.perf_counter() - began < _LOSS_S:
            time.sleep(0.001)
        if work.is_completed() and gradients.device.type == "cpu":
            work.wait()
    except RuntimeError:
        return time.perf_counter() - began
    if gradients.device.type == "cuda":
        # It would keep the GPU busy for ever.
        group.abort() if hasattr(group, "abort") else group._abort()
    return time.perf_counter() - began


if __name__ == "__main__":
    part_main(run, rank)
