"""Try the library on the GPUs of this machine, and write one report.

    make test-gpu PYTHON=~/env/bin/python ARGS="--report ~/gpu"
    python -m tests.gpu --device cpu            # tries the kit itself, with small sizes

Needs torch and numpy, no Slurm and nothing installed. docs/gpu.md describes the parts.

Exit code 0: nothing failed. 1: a part failed. 2: invalid arguments. 3: there is no torch or no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.rank_processes import SHARED_GPUS_VARIABLE
from tests.gpu.kit_report import FAILED, KitReport, PartResult, write
from tests.gpu.machine import NoMachineError, ask
from tests.gpu.part_runner import KitPart, KitSetting, run_part

#: Correctness first. Time-outs are several times what a part is expected to take.
PARTS = (
    KitPart("layouts", "Losses over restarts in other layouts equal those of one rank", 1200),
    KitPart("own_loop", "The same with a loop of one's own: DDP, FSDP2, mixed precision", 900),
    KitPart("stopping", "SIGTERM saves and ends; a killed rank ends the others", 900),
    KitPart("freezing", "Frozen layers are neither sent nor computed backward", 600),
    KitPart("measurements", "Measured parts of a step, layers and memory are true", 600),
    KitPart("profiling", "The profiler finds a planted delay", 600),
    KitPart("overhead", "A step's time, by that of plain DDP and FSDP2", 900),
    KitPart("checkpoints", "Throughput of checkpoints", 900),
    KitPart("regrouping", "Ranks join and leave a training while it runs", 1800, 2),
)
NO_DEVICE = 3
_CPU_RANKS = 2
#: Some images turn TF32 on, whose losses depend on the layout. Threads: as torchrun.
_VARIABLES = {
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
    "NVIDIA_TF32_OVERRIDE": "0",
    "OMP_NUM_THREADS": "1",
}
#: Variables that hide GPUs from CUDA and ROCm.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def main(words: list[str] | None = None) -> int:
    """Run the parts and write the report; return the exit code."""
    parser = _parser()
    args = parser.parse_args(words)
    environment = _environment(args.device)
    try:
        machine = ask(environment)
    except NoMachineError as error:
        return _impossible(str(error))
    gpus = len(machine["gpus"])
    if args.device == "cuda" and not gpus:
        return _impossible(
            f"torch {machine['torch']} sees no GPU here; to try the kit itself on the CPU:"
            " make test-gpu ARGS='--device cpu'"
        )
    if args.device == "cuda" and args.gpus and args.gpus > gpus:
        parser.error(f"--gpus: {args.gpus} is invalid: expected 1 to {gpus}")
    ranks = (args.gpus or gpus or _CPU_RANKS) * args.ranks_per_gpu
    if args.ranks_per_gpu > 1:
        environment[SHARED_GPUS_VARIABLE] = "1"
    with tempfile.TemporaryDirectory(prefix="gpu-kit-", dir=args.folder) as folder:
        setting = KitSetting(args.device, ranks, Path(folder))
        report = _run(args, setting, environment, machine)
    failed = [part.name for part in report.parts if part.state == FAILED]
    print(f"test-gpu: {len(report.parts)} parts, failed: {', '.join(failed) or 'none'}")
    print("test-gpu: report in", " and ".join(map(str, write(report, args.report))))
    return 1 if failed else 0


def _run(
    args: argparse.Namespace,
    setting: KitSetting,
    environment: dict[str, str],
    machine: dict[str, Any],
) -> KitReport:
    """Run the parts; after each the report is written, so that Ctrl-C loses no result."""
    made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    results: list[PartResult] = []
    report = KitReport(made, setting.device, setting.ranks, machine, (), args.ranks_per_gpu)
    for part in args.parts:
        print(f"test-gpu: {part.name}: {part.title} …", flush=True)
        timeout_s = args.timeout or part.timeout_s
        results.append(run_part(part, setting, environment, timeout_s=timeout_s))
        last = results[-1]
        print(f"test-gpu: {part.name}: {last.state}, {last.seconds:.0f} s {last.reason}".rstrip())
        report = dataclasses.replace(report, parts=tuple(results))
        write(report, args.report)
    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=_positive, help=f"all; with --device cpu {_CPU_RANKS} ranks")
    parser.add_argument(
        "--ranks-per-gpu", type=_positive, default=1, metavar="N",
        help="more than 1: to try on few GPUs what needs many; NCCL connects ranks by sockets",
    )  # fmt: skip
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"some of {names}")
    parser.add_argument(
        "--report", type=Path, default=Path("build/gpu-report"), metavar="PATH",
        help="of the report, without .json and .md (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, metavar="DIR",
        help="for checkpoints, on the file system to measure; 8 GB (a temporary one)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=_positive, metavar="S", help="of each part")
    return parser


def _parts(text: str) -> tuple[KitPart, ...]:
    by_name = {part.name: part for part in PARTS}
    for name in text.split(","):
        if name not in by_name:
            raise argparse.ArgumentTypeError(f"part {name} is unknown; known: {', '.join(by_name)}")
    return tuple(by_name[name] for name in text.split(","))


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is invalid: expected a number above 0")
    return int(text)


def _environment(device: str) -> dict[str, str]:
    """Return the variables of all parts: none of a job that this runs in."""
    left_out = ("SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    environment |= _VARIABLES
    if device == "cpu":
        environment |= dict.fromkeys(_VISIBLE, "")
    return environment


def _impossible(reason: str) -> int:
    print(f"test-gpu: {reason}", file=sys.stderr)
    return NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())
