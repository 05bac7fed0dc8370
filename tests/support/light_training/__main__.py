"""Training without torch that changes in place as one of the library does.

    python3 -m tests.support.light_training --out DIR [--samples N] [--epochs N]
        [--global-batch N] [--rate SAMPLES/S] [--checkpoint-every SECONDS] [--step SECONDS]

It needs the standard library and `slurm_elastic.job` only, and starts in some milliseconds, so that
many run on few cores. To esrun it says what a training of `slurm_elastic.training.init` says, in
the same order, and its ranks end with the same codes
(tests/unit/training/regroup/test_light_training.py). Among each other the ranks exchange lines of
JSON: all send their parts of a step to rank 0, which adds them up.

A step adds up numbers that depend on all steps before and on its samples, not on the ranks that
have them: a step that is lost, repeated or of other samples changes all that follow. Each member
writes its samples to OUT/samples-rankMEMBER.jsonl, rank 0 the sums to OUT/losses.jsonl, in the form
of docs/examples/train_library.py; `run` is different in each attempt. OUT/done is created when all
steps are done, or when OUT/finish is there. A rank that joins kills itself before a moment that the
file OUT/die names: `hello` (it has started), `prepare` (the group is formed), `turn` (it belongs to
the group).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from tests.support.light_training.light_leader import Leader
from tests.support.light_training.light_member import Member


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="light_training.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=40.0, help="samples/s of each rank")
    parser.add_argument("--step", type=float, default=0.0, help="seconds of a step; 0: by --rate")
    parser.add_argument("--checkpoint-every", type=float, default=5.0, metavar="SECONDS")
    return parser.parse_args()


def main() -> None:
    """Run as rank 0 or as another member."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    rank, companion = int(os.environ.get("RANK", "0")), os.environ.get(JOIN_VARIABLE, "")
    if companion:
        Member(args, f"{companion}.{os.environ.get('SLURM_PROCID', '0')}").run_to_end()
    base = os.environ.get("SLURM_JOB_ID", "0")
    (Member if rank else Leader)(args, f"{base}.{rank}").run_to_end()


if __name__ == "__main__":
    main()
