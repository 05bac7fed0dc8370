"""One rank of `time_to_loss`: all arms train in turn until a loss is reached.

Rank 0 prints, of each arm, seconds, samples and updates as one line of JSON.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.pipeline.ranks import Bench, rank_parser, report

if TYPE_CHECKING:
    from slurm_elastic.models.pipedream.partitioner import PipelinePartition

#: Steps of a block, after which the loss is looked at; `pipedream` drains after each.
_BLOCK = 12


def main() -> None:
    """Join the network, then the process group, and run."""
    parser = rank_parser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--most", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    args.model, args.shrink, args.slow, args.rounds, args.steps = "linear", 1.0, 1.0, 1, _BLOCK
    report(args, lambda: Race(args).run())


class Race(Bench):
    """Arms that learn one function from the same samples, in the same order, each seen once."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self.width, self._loss, self._most = args.width, args.loss, args.most
        self._rate, self.seed = args.rate, args.seed

    def targets(self, inputs: Any, generator: Any) -> Any:
        """Return a smooth function of the inputs, the same on every rank."""
        del generator
        waves = (inputs[:, :1] + inputs[:, 1:2]).sin() * inputs[:, 2:3].cos()
        return 0.8 * waves

    def run(self) -> dict[str, Any]:
        """Measure; all ranks return, rank 0's is complete."""
        import torch.distributed as dist  # noqa: PLC0415

        plan, _, _, size = self.measured_plan()
        arms = self.learning_arms(plan)
        results: dict[str, dict[str, Any]] = {
            name: {"seconds": 0.0, "blocks": 0, "losses": []} for name in arms
        }
        for _ in range(self._most):
            for name, (updates, block) in arms.items():
                row = results[name]
                if row["losses"] and row["losses"][-1] <= self._loss:
                    continue
                dist.barrier()
                begun = time.perf_counter()
                losses = block(_BLOCK)
                dist.barrier()
                row["seconds"] += time.perf_counter() - begun
                row["blocks"] += 1
                row["losses"].append(agreed(sum(losses) / len(losses)))
                row["samples"] = row["blocks"] * _BLOCK * self.batch
                row["updates"] = row["blocks"] * _BLOCK * updates
        return {
            "arms": results,
            "plan": [[stage.replicas, len(stage.layers)] for stage in plan.stages],
            "parameter_bytes": 4 * size,
            "batch": self.batch,
        }

    def learning_arms(
        self, plan: PipelinePartition
    ) -> dict[str, tuple[int, Callable[[int], list[float]]]]:
        """Return the arms by name: updates in a step, and a function that takes so many steps.

        A step's samples are the same for all. Data parallelism updates once by all of them, with
        the same learning rate and with as many times that as there are ranks.
        """
        replicas = [stage.replicas for stage in plan.stages]
        lengths = [len(stage.layers) for stage in plan.stages]
        whole, scaled = [len(self.layers())], self.ranks * self._rate
        flat = [self.ranks]
        return {
            "data parallel": (1, self.synchronous(flat, whole, "1f1b", self._rate)),
            f"data parallel, rate x{self.ranks}": (
                1, self.synchronous(flat, whole, "1f1b", scaled),
            ),
            f"DDP, rate x{self.ranks}": (1, self.overlapped(scaled)),
            f"1f1b, rate x{self.ranks}": (1, self.synchronous(replicas, lengths, "1f1b", scaled)),
            "pipedream": (self.ranks, self.asynchronous(replicas, lengths, self._rate)),
        }  # fmt: skip


def agreed(loss: float) -> float:
    """Return rank 0's loss on all ranks, which stop together; infinity for one that is none."""
    import torch  # noqa: PLC0415

    value = torch.tensor([loss if math.isfinite(loss) else 1e30], dtype=torch.float64)
    torch.distributed.broadcast(value, 0)
    return float(value)


if __name__ == "__main__":
    main()
