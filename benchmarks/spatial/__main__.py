"""Samples cut in space: memory, bytes, reading and speed of a rank against its share.

    python -m benchmarks.spatial [--width 64] [--steps 5] [--ranks 1,2,4] [--rate 40mbit]

One spatial group of 1, 2 and 4 ranks of one thread each on this machine, gloo, cut along the first
dimension: CosmoFlow and a 3D U-Net with a quarter of the paper's channels. What is printed:

    layers      the paper's CosmoFlow from 128 to 512 voxels wide, from its layers: parameters,
                operations, activations, planes that an inner rank of four sends; and the smallest
                group for GPUs of 16 GB
    memory      tensors kept for the backward pass, counted by hooks, against one rank and the model
    planes      bytes sent in both passes, against the formula
    reading     bytes and seconds of a rank's slab of a sample, raw and HDF5, against the whole
    losses      CosmoFlow and U-Net of docs/examples/train_volumes.py, 20 steps of AdamW, 2 and 4
                ranks that share each sample and two groups of 2: the largest difference of a loss
                from that of one rank, in both precisions; beside it one rank that sums the
                gradients in another order. It takes longest by far
    speed       CPU seconds of both passes against the model, whose layers are measured without
                messages
    overlap     both passes when planes travel beside the computation, and before it, against passes
                without planes, over two network namespaces; needs root. By default the link has
                the rate at which those before it take half as long as the layers; for this width
                and twice of it

CPU seconds are compared, since ranks share processors: they tell how well the model adds up work
and surfaces, not how fast a group would be on GPUs of its own; so nothing but this benchmark uses
the speed model (docs/spatial.md).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.joined_namespaces import (
    NAMESPACES,
    Link,
    LinkSetupError,
    figures_of_ranks,
    joined_namespaces,
)
from benchmarks.support.turn_times import TurnTimes, of_slowest_rank

_GIB, _MIB = 2**30, 2**20
_GPU_BYTES = 16 * 10**9
#: Bytes that pass at once, far fewer than planes have.
_BURST = "16kb"
#: Corrections of the link's rate, and the least factor of one.
_CORRECTIONS, _LEAST_CORRECTION = 4, 0.2

_LOSS_STEPS = 20
#: Trainings whose losses are compared: ranks, and how many of them share a sample.
_GROUPS = ((2, 2), (4, 4), (4, 2))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spatial")
    parser.add_argument("--width", type=int, default=64, help="voxels of CosmoFlow's input")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each arm")
    parser.add_argument("--ranks", default="1,2,4", help="sizes of groups")
    parser.add_argument("--rate", help="of the limited link, as tc reads it; sought by default")
    parser.add_argument("--volume", type=int, default=128, help="voxels of samples that are read")
    parser.add_argument("--no-overlap", action="store_true", help="leave out the limited link")
    parser.add_argument("--no-losses", action="store_true", help="leave out the trainings")
    args = parser.parse_args()
    sizes = [int(size) for size in args.ranks.split(",")]
    _print_layers()
    for network, width in (("cosmoflow", args.width), ("unet", 32)):
        _print_network(network, width, sizes, args.steps)
    _print_reading(args.volume, sizes, args.steps)
    if not args.no_losses:
        for network in ("cosmoflow", "unet"):
            _print_losses(network)
    if not args.no_overlap:
        for width in (args.width, 2 * args.width):
            _print_overlap(width, args.steps, args.rate)


def _print_layers() -> None:
    from benchmarks.spatial.networks import cosmoflow  # noqa: PLC0415
    from slurm_elastic.core.slab_grid import SlabGrid  # noqa: PLC0415
    from slurm_elastic.models.spatial.group_memory import (  # noqa: PLC0415
        group_memory,
        least_group,
    )
    from slurm_elastic.training.spatial.network_trace import trace_network  # noqa: PLC0415

    print("layers: the paper's CosmoFlow, one sample, float32")
    print("  width norm  parameters M  GFLOP  activations GiB  planes MiB  group for 16 GB")
    alone, inner = SlabGrid((1, 1, 1)), SlabGrid((4, 1, 1), 1)
    for width in (128, 256, 512):
        for norm in (False, True):
            network = trace_network(cosmoflow(width, norm=norm), 4, (width,) * 3)
            kept = 4 * sum(volume.values(alone) for volume in network.kept)
            group = least_group(network, _GPU_BYTES)
            needs = group_memory(network, group).total / _GIB if group else math.nan
            print(
                f"  {width:5} {'yes' if norm else 'no':4}  {network.parameters / 1e6:12.1f}"
                f" {network.operations / 1e9:6.1f} {kept / _GIB:16.2f}"
                f" {network.sent_bytes(inner)[0] / _MIB:11.1f}"
                f"  {group[0] if group else 'none'} ranks, {needs:.1f} GiB each"
            )


def _print_network(name: str, width: int, sizes: Sequence[int], steps: int) -> None:
    import torch  # noqa: PLC0415

    from benchmarks.spatial.group_speed import LinkTime, step_seconds  # noqa: PLC0415
    from benchmarks.spatial.ranks import NETWORKS  # noqa: PLC0415
    from slurm_elastic.core.slab_grid import SlabGrid  # noqa: PLC0415
    from slurm_elastic.models.spatial.group_memory import group_memory  # noqa: PLC0415
    from slurm_elastic.training.spatial.network_trace import trace_network  # noqa: PLC0415

    channels, make = NETWORKS[name]
    with torch.no_grad():
        network = trace_network(make(width), channels, (width,) * 3)
    print(f"{name}, {width} voxels wide, one group")
    print("  ranks  kept MiB  of one  model  planes sent B (formula)    CPU s  model  error")
    first = 0
    for size in sizes:
        figures = run_ranks("group", name, width, size, steps)
        kept = max(f["kept"] for f in figures)
        first = first or kept
        memory = group_memory(network, (size, 1, 1))
        sent = sum(sum(f["sent"]) for f in figures)
        formula = sum(sum(network.sent_bytes(SlabGrid((size, 1, 1), i))) for i in range(size))
        cpu_s = max(statistics.median(f["cpu_s"]) for f in figures)
        latency_s, per_byte_s = (statistics.median(f["link"][i] for f in figures) for i in range(2))
        link = LinkTime(latency_s, per_byte_s)
        # As many at once as a group has, since they share caches and memory.
        timed = run_ranks("layers", name, width, size, steps, parts=size)
        layer_s = max((f["layers"] for f in timed), key=sum)
        model_s = step_seconds(network, SlabGrid((size, 1, 1), size // 2), layer_s, link)
        print(
            f"  {size:5} {kept / _MIB:9.2f} {kept / first:7.3f}"
            f" {(memory.activations + memory.planes) / kept:6.3f}"
            f"  {sent:10} ({formula:10}) {cpu_s:8.3f} {model_s:6.3f} {model_s / cpu_s - 1:+6.1%}"
        )


def _print_reading(width: int, sizes: Sequence[int], repeated: int) -> None:
    import numpy as np  # noqa: PLC0415

    from slurm_elastic.core.slab_grid import SlabGrid  # noqa: PLC0415
    from slurm_elastic.training.spatial.volume_files import (  # noqa: PLC0415
        Hdf5Volumes,
        RawVolumes,
    )

    shape = (4, width, width, width)
    values = np.random.default_rng(0).normal(size=shape).astype("<f4")
    with tempfile.TemporaryDirectory() as folder:
        raw_path, hdf5_path = f"{folder}/sample.raw", f"{folder}/sample.h5"
        values.tofile(raw_path)
        readers: dict[str, Any] = {
            "raw": RawVolumes([raw_path], [0.0], extents=shape[1:], channels=4)
        }
        if importlib.util.find_spec("h5py"):
            h5py: Any = importlib.import_module("h5py")
            with h5py.File(hdf5_path, "w") as file:
                file["inputs"], file["targets"] = values, np.zeros(4, dtype="<f4")
            readers["hdf5"] = Hdf5Volumes([hdf5_path])
        else:
            print("reading: hdf5 left out: h5py is not installed")
        mib = values.nbytes / _MIB
        print(f"reading: a sample of 4 x {width}^3, {mib:.0f} MiB, files not cached")
        print("  format  ranks  MiB of a rank  of one  seconds  of one")
        for kind, reader in readers.items():
            path = raw_path if kind == "raw" else hdf5_path
            seconds: dict[int, list[float]] = {size: [] for size in sizes}
            counts: dict[int, int] = {}
            for turn in range(2 * repeated):
                for size in sizes if turn % 2 else reversed(sizes):
                    with Path(path).open("rb") as file:
                        os.fsync(file.fileno())
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    before, begun_at = reader.read_bytes, time.monotonic()
                    reader.read(0, SlabGrid((size, 1, 1), size // 2).slab(reader.extents))
                    seconds[size].append(time.monotonic() - begun_at)
                    counts[size] = reader.read_bytes - before
            for size in sizes:
                median_s = statistics.median(seconds[size])
                print(
                    f"  {kind:6} {size:6} {counts[size] / _MIB:14.2f} "
                    f"{counts[size] / counts[sizes[0]]:7.3f} {median_s:8.4f}"
                    f" {median_s / statistics.median(seconds[sizes[0]]):7.3f}"
                )


def _print_losses(network: str) -> None:
    print(f"losses: {network} of train_volumes.py, 32^3, {_LOSS_STEPS} steps of AdamW")
    print("  type     layout                  largest difference from 1x1 up to step 5, 10, …")
    for dtype in ("float32", "float64"):
        alone = _losses(network, dtype, ranks=1, group=1)
        arms = {f"{n // g}x1s{g}": _losses(network, dtype, ranks=n, group=g) for n, g in _GROUPS}
        arms["1x1, passes of 1 sample"] = _losses(network, dtype, ranks=1, group=1, micro=1)
        for layout, losses in arms.items():
            differences = [abs(a - b) for a, b in zip(losses, alone, strict=True)]
            by_step = " ".join(f"{max(differences[:n]):8.1e}" for n in range(5, _LOSS_STEPS + 1, 5))
            print(f"  {dtype}  {layout:23} {by_step}", flush=True)


def _losses(network: str, dtype: str, *, ranks: int, group: int, micro: int = 4) -> list[float]:
    """Return the losses of a training, by step.

    Args:
        network: of the example.
        dtype: of weights and samples.
        ranks: of the training.
        group: of these share a sample.
        micro: samples that go through the model at once.
    """
    options = {"network": network, "dtype": dtype, "group": group, "micro": micro}
    options["steps"] = _LOSS_STEPS
    losses: Any = figures_of_ranks("benchmarks.spatial.layout_losses", ranks, options, link=None)
    return list(losses[0])


def _print_overlap(width: int, steps: int, rate: str | None) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    if any(name in listed.stdout for name in NAMESPACES):
        print("overlap: left out: another run has its network namespaces")
        return
    with contextlib.ExitStack() as stack:
        try:
            link = stack.enter_context(joined_namespaces())
        except LinkSetupError as error:
            print(f"overlap: left out: {error}")
            return
        rate = rate or _balanced_rate(width, link)
        link.shape(rate, _BURST)
        times = _overlap_times(width, 2 * steps, link)
    awaited, beside = (_median_difference(times, arm) for arm in ("waiting", "overlapped"))
    print(f"overlap: cosmoflow, {width} voxels wide, two ranks, {rate}; medians, slower rank")
    print(f"  without planes                   {statistics.median(times['alone']):7.3f} s")
    print(f"  planes before the computation   +{awaited:7.3f} s")
    print(f"  planes beside the computation   +{beside:7.3f} s, {beside / awaited:.2f} of it (0.5)")


def _balanced_rate(width: int, link: Link) -> str:
    """Return the rate at which awaited planes lengthen both passes by half.

    Messages also take time to begin and end, so the rate is measured, and corrected.
    """
    mbit_s = 50.0
    for _ in range(_CORRECTIONS):
        link.shape(f"{mbit_s:.1f}mbit", _BURST)
        times = _overlap_times(width, 3, link)
        wanted_s = statistics.median(times["alone"]) / 2
        mbit_s *= max(_median_difference(times, "waiting") / wanted_s, _LEAST_CORRECTION)
    return f"{mbit_s:.1f}mbit"


def _median_difference(times: TurnTimes, arm: str) -> float:
    """Return the seconds by which an arm takes longer than one without planes."""
    return statistics.median(a - b for a, b in zip(times[arm], times["alone"], strict=True))


def _overlap_times(width: int, steps: int, link: Link) -> TurnTimes:
    """Return the seconds of both passes of each arm in each turn."""
    return of_slowest_rank(run_ranks("overlap", "cosmoflow", width, 2, steps, link=link))


def run_ranks(
    part: str,
    network: str,
    width: int,
    ranks: int,
    steps: int,
    *,
    parts: int = 1,
    link: Link | None = None,
) -> list[dict[str, Any]]:
    """Run one part in this number of processes; return what each has written.

    Of part `layers`, `parts` is the size of the group of which one rank's layers are measured.

    Raises:
        SystemExit: a rank failed.
    """
    options = {"part": part, "network": network, "width": width, "steps": steps, "parts": parts}
    return figures_of_ranks("benchmarks.spatial.ranks", ranks, options, link=link)


if __name__ == "__main__":
    main()
