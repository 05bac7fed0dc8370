"""Exchange of gradients during the backward pass, on links of a chosen speed.

    python -m benchmarks.overlap [--rounds 10] [--batch 2048] [--rate 600mbit] [--json]

Two ranks of one thread each, gloo, in two network namespaces of this machine that a pair of veth
joins; needs root, `ip` and `tc`. They are measured twice: without a limit, and with a token bucket
on both ends whose rate makes the exchange alone, as measured, as long as the backward pass. Without
namespaces the loopback is measured, and said so. With 2,048 samples in a step that link is slow, so
the exchange needs few of the cores, as where network cards do it. Arms take turns of a few steps,
in an order that is turned around in every round (A-B-B-A), each begun at a barrier; of each turn
the slower rank counts. Times are medians, and ratios of two arms medians of those of each round,
in which both meet the same machine:

    alone       forward and backward pass, nothing is exchanged
    exchange    the flat all-reduce, nothing is computed
    flat        both, one after the other: `overlap="none"`
    buckets-…   `overlap="buckets"` in each size
    ddp-…       DistributedDataParallel, by default (25 MB) and with buckets of 1 MB
    adamw-…     with an update: buckets of 1 MiB, DistributedDataParallel with buckets of 1 MB,
                `overlap="sliced"`, whose weights arrive during the forward pass of the next step,
                and PyTorch's FSDP2; with a fourth of the samples, as updates are a considerable
                part of such steps only, and with a rate of their own

The exposed share of an arm is (its step - alone) / exchange. The least that is possible is printed,
too: what copies, sends and adds up gradients needs cores, on which the ranks compute. Buckets of
1 MiB and DistributedDataParallel with buckets of 1 MB differ by less than ten rounds can show, as
do `sliced` and buckets with an update. So these pairs also take turns without other arms, in four
times the rounds; the quartiles of those ratios are printed, too. Then, on either link, a training
of `init(…, overlap="auto")`, with what it logs about its choice, and the step of the schedule that
it chose without a limit by that of `flat`; and, on the loopback, the largest difference of the
gradients of buckets from those of the flat exchange over 2, 3 and 4 ranks.

Products of tensor parallelism: a perceptron of 1,024, 3,072 and 1,024 features, whose layers both
ranks share, forward and backward pass of 2,048 tokens. The link's rate makes the two sums of a step
about as long as its other half, so as long as the products during which they can travel. Arms: the
passes of a rank's part alone, the sums alone, and both in 1, 2, 4 and 8 chunks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.overlap.exposed_share import BACKWARD, CPU, exposed, least_exposed
from benchmarks.overlap.ranks import (
    BUCKETS,
    CHUNKS,
    DDP,
    GRADIENT_BYTES,
    PAIR,
    PRODUCT_BYTES,
    SHARDED,
    SLICED,
    UPDATING_PAIR,
    WHOLE,
    WHOLE_BY_DDP,
)
from benchmarks.support.joined_namespaces import (
    Link,
    LinkSetupError,
    figures_of_ranks,
    joined_namespaces,
)
from benchmarks.support.turn_times import TurnTimes, of_slowest_rank

#: Arms whose ratio is the exchange's share.
_SHARE = ("exchange", "alone")
#: Of the sums of shared layers to their passes: three of six products can hide a sum.
_HIDING = 1 / 2
#: Corrections of a link's rate, after which the exchange takes about as long as it should.
_CORRECTIONS = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=int, default=2, help="steps of an arm before the next one")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank in a step")
    parser.add_argument("--rate", help="of the link, as tc reads it; by default as above")
    parser.add_argument("--steps", type=int, default=70, help="of the training of `init`")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = measure(args)
    if args.json:
        print(json.dumps(figures))
    else:
        _show(figures)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the steps of all arms, with and without a limit, and what the library has chosen."""
    figures: dict[str, Any] = {"differences": {}}
    for ranks in (2, 3, 4):
        results = run_ranks("differences", ranks, args, link=None)
        figures["differences"][str(ranks)] = max(results[0]["differences"])
    with contextlib.ExitStack() as stack:
        try:
            link: Link | None = stack.enter_context(joined_namespaces())
        except LinkSetupError as error:
            figures["no_link"], link = str(error), None
        results = run_ranks("arms", 2, args, link=link)
        figures["unshaped"] = of_slowest_rank(results)
        figures["chosen_unshaped"] = run_ranks("training", 2, args, link=link)[0]["chosen"]
        if link is None:
            return figures
        figures["rate"] = args.rate or balanced_rate(
            link,
            "arms",
            args,
            exchanged=GRADIENT_BYTES,
            passes_s=medians(figures["unshaped"])["alone"],
            share=BACKWARD,
        )
        link.shape(figures["rate"])
        results = run_ranks("arms", 2, args, link=link)
        figures["shaped"] = of_slowest_rank(results)
        figures["pair"] = of_slowest_rank(run_ranks("pair", 2, args, link=link))
        figures["chosen"] = run_ranks("training", 2, args, link=link)[0]["chosen"]
        for part, exchanged, share in (
            ("updates", GRADIENT_BYTES, BACKWARD),
            ("products", PRODUCT_BYTES, _HIDING),
        ):
            link.unshape()
            results = run_ranks(part, 2, args, link=link)
            free = figures[f"{part}_unshaped"] = of_slowest_rank(results)
            rate = figures[f"{part}_rate"] = balanced_rate(
                link, part, args, exchanged=exchanged, passes_s=medians(free)["alone"], share=share
            )
            link.shape(rate)
            results = run_ranks(part, 2, args, link=link)
            figures[part] = of_slowest_rank(results)
            if part == "updates":
                pair = run_ranks("updates-pair", 2, args, link=link)
                figures["updates_pair"] = of_slowest_rank(pair)
                states = [r["state"] for r in results]
                figures["state"] = max(state[SLICED] / state[WHOLE] for state in states)
    return figures


def balanced_rate(
    link: Link,
    part: str,
    args: argparse.Namespace,
    *,
    exchanged: int,
    passes_s: float,
    share: float,
) -> str:
    """Return the rate of the link at which the exchange alone takes a share of the passes.

    An exchange takes longer than its bytes do: processes copy them, and begin and end it. So the
    rate is measured, and corrected.

    Args:
        link: left with a rate near the one returned.
        part: of the ranks, with arms `alone` and `exchange`.
        args: options of the command line.
        exchanged: bytes that a rank sends in a step.
        passes_s: time of the passes, measured without a limit.
        share: of the time of the passes.
    """
    mbit_s = 8 * exchanged / (share * passes_s) / 1e6
    for _ in range(_CORRECTIONS):
        link.shape(f"{mbit_s:.0f}mbit")
        apart = medians(of_slowest_rank(run_ranks(f"{part}-apart", 2, args, link=link)))
        mbit_s *= apart["exchange"] / (share * apart["alone"])
    return f"{mbit_s:.0f}mbit"


def medians(steps: TurnTimes) -> dict[str, float]:
    """Return the median step of each arm.

    >>> medians({"flat": [3.0, 1.0, 5.0]})
    {'flat': 3.0}
    """
    return {arm: statistics.median(seconds) for arm, seconds in steps.items()}


def ratios(steps: TurnTimes, arm: str, other: str) -> list[float]:
    """Return the ratio of the steps of two arms in each round.

    >>> ratios({"flat": [3.0, 2.0], "ddp-1MB": [2.0, 2.0]}, "flat", "ddp-1MB")
    [1.5, 1.0]
    """
    return [own / its for own, its in zip(steps[arm], steps[other], strict=True)]


def ratio(steps: TurnTimes, arm: str, other: str) -> float:
    """Return the median ratio of two arms: both steps of a round meet the same machine."""
    return statistics.median(ratios(steps, arm, other))


def chosen_schedule(lines: Sequence[str]) -> str:
    """Return the schedule that a training chose, by its log; it begins with `flat`.

    >>> chosen_schedule(["exchange of gradients: buckets-1MiB, a step takes 0.71 of one with flat"])
    'buckets-1MiB'
    >>> chosen_schedule([])
    'flat'
    """
    if not lines:
        return "flat"
    return lines[-1].partition("exchange of gradients: ")[2].partition(",")[0]


def run_ranks(
    part: str, ranks: int, args: argparse.Namespace, *, link: Link | None
) -> list[dict[str, Any]]:
    """Run one part in this number of processes; return what each has written.

    Raises:
        SystemExit: a rank failed.
    """
    options = {"part": part, "rounds": args.rounds, "turn": args.turn}
    options |= {"batch": args.batch, "steps": args.steps}
    return figures_of_ranks("benchmarks.overlap.ranks", ranks, options, link=link)


def _show(figures: dict[str, Any]) -> None:
    print("1 equality: largest difference of a gradient, of the largest of its tensor:")
    for ranks, difference in figures["differences"].items():
        print(f"    {ranks} ranks  {difference:.1e}")
    if "no_link" in figures:
        print(f"  no shaped link: {figures['no_link']}; the loopback instead of namespaces")
    unshaped = figures["unshaped"]
    _show_link("2 without a limit", unshaped)
    for line in figures["chosen_unshaped"]:
        print(f"    {line}")
    chosen = chosen_schedule(figures["chosen_unshaped"])
    print(f"    step of {chosen} by flat's {ratio(unshaped, chosen, 'flat'):.2f} (1.03)")
    if "shaped" not in figures:
        return
    shaped = figures["shaped"]
    _show_link(f"  tbf {figures['rate']}", shaped)
    best = min(BUCKETS, key=lambda arm: ratio(shaped, arm, "flat"))
    ddp = min(DDP, key=lambda arm: ratio(shaped, arm, "flat"))
    shares = [exposed(medians(shaped), arm) for arm in (best, "flat")]
    print(f"  best on the shaped link: {best}")
    print(f"    exposed by flat's        {shares[0] / shares[1]:.2f} (0.5)")
    print(f"    step by flat's           {ratio(shaped, best, 'flat'):.2f} (0.85)")
    print(f"    step by the best ddp's   {ratio(shaped, best, ddp):.2f} (1.00), {ddp}")
    _show_pair(figures["pair"], PAIR)
    print(f"3 sliced optimizer state of a rank, by the whole {figures['state']:.2f} (0.55)")
    for name, steps, aim in (
        ("without a limit", figures["updates_unshaped"], ""),
        (f"tbf {figures['updates_rate']}", figures["updates"], " (1.00)"),
    ):
        print(f"  {name}: exchange alone / passes alone {ratio(steps, *_SHARE):.2f}")
        for other in (WHOLE, WHOLE_BY_DDP):
            print(f"    step by that of {other} {ratio(steps, SLICED, other):.2f}{aim}")
        print(f"    step by that of {SHARDED} {ratio(steps, SLICED, SHARDED):.2f}")
    _show_pair(figures["updates_pair"], UPDATING_PAIR)
    for name, steps in (
        ("4 products of shared layers, without a limit", figures["products_unshaped"]),
        (f"  tbf {figures['products_rate']}", figures["products"]),
    ):
        print(f"{name}: sums alone / passes alone {ratio(steps, *_SHARE):.2f}")
        by_one = {arm: ratio(steps, arm, CHUNKS[0]) for arm in CHUNKS}
        for arm, value in by_one.items():
            print(f"    {arm:<15} step by that of 1 chunk {value:.2f}")
    best = min(by_one, key=lambda arm: by_one[arm])
    print(f"    best {best}: {by_one[best]:.2f} (0.90)")
    print("5 a training of init(overlap='auto') on the shaped link:")
    for line in figures["chosen"]:
        print(f"    {line}")


def _show_pair(steps: TurnTimes, pair: tuple[str, str]) -> None:
    low, median, high = statistics.quantiles(ratios(steps, *pair), n=4)
    print(
        f"    {pair[0]} by {pair[1]}, in turns {median:.2f} (1.00), quartiles {low:.2f}, {high:.2f}"
    )


def _show_link(name: str, steps: TurnTimes) -> None:
    times = medians(steps)
    print(f"{name}: exchange alone / passes alone {ratio(steps, *_SHARE):.2f}")
    for arm in ("flat", *BUCKETS, *DDP):
        share = exposed(times, arm)
        print(f"    {arm:<15} step by flat's {ratio(steps, arm, 'flat'):.2f}, exposed {share:.0%}")
    cores = os.cpu_count() or 1
    least = least_exposed(times, ranks=2, cores=cores)
    print(
        f"    the exchange alone keeps {times[CPU] / times['exchange']:.2f} of {cores} cores busy:"
        f" at least {least:.0%} is exposed"
    )


if __name__ == "__main__":
    main()
