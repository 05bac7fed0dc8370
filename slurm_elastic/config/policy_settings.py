"""Sections of `elastic.toml` for policies: keys, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.config.key import key


def _solver(value: str) -> None:
    prefix, _, name = value.partition(":")
    if value != "highs" and not (prefix == "pulp" and name.replace("_", "").isalnum()):
        raise ValueError("highs, or pulp:NAME of a solver that PuLP can call: pulp:CBC")


@dataclass(frozen=True, kw_only=True)
class SiaSettings:
    """Section `[sia]`; defaults as published."""

    p: float = key(
        -0.5,
        "Fairness power: below 0 equalises the jobs' goodput, above 0 maximises its sum.",
        bounds=(-10, 10),
    )
    lambda_n: float = key(
        1.1,
        "Cost of a job without GPUs; its smallest configuration costs 1.",
        bounds=(0, 1e6),
    )
    max_cost: float = key(3000.0, "Largest cost of a configuration.", bounds=(1, 1e9))
    solver: str = key(
        "highs",
        "Solver of the integer program: `highs` (built in), or `pulp:NAME`, one that the site has:"
        " CBC, GLPK, SCIP, Gurobi, CPLEX or another that PuLP can call (docs/sia.md).",
        parse=_solver,
    )
    time_limit_s: float = key(
        5.0,
        "Seconds for the integer program; then the best solution so far is used.",
        bounds=(0.01, 3600),
    )
    growth: float = key(
        2.0, "A job grows to at most this multiple of the most GPUs measured.", bounds=(1, 1e6)
    )
    whole_nodes: int = key(
        16,
        "Whole-node configurations of every count up to this many nodes; above, in growing steps.",
        bounds=(1, 10000),
    )
    share: bool = key(
        False, "A new job starts from measurements of earlier jobs of the same application."
    )
    artifact_compat: bool = key(
        False, "Decide as the published artifact does where it differs from its paper."
    )
    artifact_rules: tuple[str, ...] = key(
        (),
        "Single rules of the artifact to follow (docs/sia.md).",
        choices=(
            "batch-cap",
            "first-type",
            "first-observed",
            "restart-constants",
            "restart-window",
            "free-suspension",
            "rounding",
        ),
    )
    restart_s: dict[str, float] = key(
        {
            "cifar10": 30.0,
            "deepspeech2": 25.0,
            "bert": 120.0,
            "yolov3": 45.0,
            "imagenet": 250.0,
        },
        "Seconds of a restart by application, under the rule `restart-constants`.",
    )


@dataclass(frozen=True, kw_only=True)
class GoodputSettings:
    """Section `[goodput]`; where the defaults come from: docs/goodput-figures.md."""

    p: float = key(
        0.5,
        "Power of the gains: below 1 the first GPUs of a job count more than further ones.",
        bounds=(0.05, 1),
    )
    price: float = key(
        0.02,
        "Price of a GPU of the slowest type: seconds of one job's life per GPU second.",
        bounds=(1e-6, 100),
    )
    prices: dict[str, float] = key(
        {},
        "Prices of single types, e.g. { a100 = 0.08 }; others follow the jobs' speeds on them.",
        bounds=(1e-6, 100),
    )
    charge: float = key(
        0.0625,
        "Fraction of the price of its GPUs that is taken off a job's profit: above 0 saves GPU"
        " hours.",
        bounds=(0, 10),
    )
    hysteresis: float = key(
        0.05, "Fraction by which the gain of every change counts less.", bounds=(0, 0.9)
    )
    lengths: bool = key(
        True, "Weigh jobs that report their progress by the work that they have left."
    )
    predicted: bool = key(
        False,
        "Weigh other jobs by their predicted run time, where `[durations]` predicts one.",
    )
    length_power: float = key(
        0.15,
        "Weight of these lengths: a job with n hours left counts n to the power of minus this;"
        " lengths count less where there are more than four GPUs per job.",
        bounds=(0, 1),
    )
    wait_s: float = key(
        3600.0,
        "Seconds after which a waiting job gets its smallest size before all others; 0: never.",
        bounds=(0, 1e7),
    )
    share: bool = key(
        True, "A new job starts from measurements of earlier jobs of the same application."
    )
    residuals: bool = key(
        True, "Correct the fits of step times by what they leave over (docs/models.md)."
    )
    growth: float = key(
        64.0, "A job grows to at most this multiple of the most GPUs measured.", bounds=(1, 1e6)
    )
    profiles: int = key(
        0,
        "GPU types that a job measures at most by a short run on one idle GPU, where nothing is"
        " known of it there; 0: none.",
        bounds=(0, 100),
    )
    profile_s: float = key(
        300.0, "Longest such run, in seconds; it ends with the first report.", bounds=(1, 1e5)
    )
    whole_nodes: int = key(
        16,
        "Whole-node configurations of every count up to this many nodes; above, in growing steps.",
        bounds=(1, 10000),
    )
    time_limit_s: float = key(
        5.0,
        "Seconds for the integer program; then the best solution so far is used.",
        bounds=(0.01, 3600),
    )


@dataclass(frozen=True, kw_only=True)
class ElasticBatchSettings:
    """Section `[elastic_batch]`; defaults as published.

    What the paper leaves out is off: `restart_cost`, `statistical`, `starvation_s`.
    """

    mode: str = key(
        "queue",
        "A job that gets no GPUs at a division waits (`queue`) or is rejected for good (`drop`).",
        choices=("queue", "drop"),
    )
    interval_s: float = key(600.0, "Seconds between two divisions of the GPUs.", bounds=(0, 86400))
    batch: str = key(
        "elastic",
        "`elastic` also chooses batches; the others only GPUs, at the largest or a random batch.",
        choices=("elastic", "fixed-max", "fixed-random"),
    )
    accumulate: bool = key(
        False, "Allow batches beyond GPU memory, computed in several micro-steps."
    )
    restart_cost: bool = key(
        False, "Count restarts: a change loses its restart's seconds of the interval ahead."
    )
    statistical: bool = key(
        False, "Maximise goodput instead of throughput: weigh samples by statistical efficiency."
    )
    starvation_s: float = key(
        0.0,
        "No job waits longer than this while others hold more than MIN; 0: no such guard.",
        bounds=(0, 1e7),
    )
    growth: float = key(
        2.0, "A job grows to at most this multiple of the most GPUs measured.", bounds=(1, 1e6)
    )
    analysed: bool = key(
        True,
        "In simulations, jobs begin with measured times, as from the paper's scalability analyser.",
    )


@dataclass(frozen=True, kw_only=True)
class LasSettings:
    """Section `[las]`."""

    queue_gpu_s: float = key(
        3250.0, "GPU seconds of service after which a job is in the second queue.", bounds=(0, 1e12)
    )
    promote: float = key(
        0.0,
        "A job that waited this multiple of its run time returns to the first queue; 0: never.",
        bounds=(0, 1e6),
    )
    pack_loss: float = key(
        0.1,
        "A job that loses this fraction of its speed on twice the nodes runs on few nodes only.",
        bounds=(0, 1),
    )


@dataclass(frozen=True, kw_only=True)
class QssfSettings:
    """Section `[qssf]`."""

    ageing: float = key(
        0.3,
        "GPU seconds by which a job's predicted service counts less for each second that it has"
        " waited; 0: large jobs may starve, as published.",
        bounds=(0, 1e6),
    )
    backfill: bool = key(
        True, "Start jobs that do not delay the first one without room; false as published."
    )
    quantile: float = key(
        0.9, "Quantile of the predicted run time that backfill counts with.", bounds=(0.1, 0.99)
    )


@dataclass(frozen=True, kw_only=True)
class DallySettings:
    """Section `[dally]`."""

    timers: str = key(
        "own",
        "How long gangs wait for a near place: `own` is our policy; `auto`, `nowait`, `full`, or"
        " two numbers of leases such as `12,24`, are the published one, with its job order.",
    )
    lease_s: float = key(3600.0, "Seconds after which a running gang bids again.", bounds=(1, 1e7))
    floor_s: float = key(
        600.0,
        "Least seconds that a job runs before it may be preempted, shrunk or moved; ten of its"
        " restarts if that is more.",
        bounds=(0, 1e7),
    )
    history: float = key(
        24.0, "Leases for which waits are remembered to tune the timers.", bounds=(1, 1e6)
    )
