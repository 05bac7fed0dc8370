r"""`elastic.toml`: the schema, its defaults, and errors that name file and line.

>>> parse('[controller]\npolicy = "fair"').controller.interval_s
30.0
>>> parse('[controller]\nmode = "x"', name="my.toml")  # doctest: +ELLIPSIS
Traceback (most recent call last):
slurm_elastic...ConfigError: my.toml:2: mode "x" is unknown; known: observe, advise, act
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

from slurm_elastic.config.section_reader import ConfigError, read_section, where_is

__all__ = ["DEFAULT_PATH", "UNLIMITED", "Config", "ConfigError", "load", "parse"]

DEFAULT_PATH = Path("/etc/slurm-elastic/elastic.toml")

#: A count that nobody reaches.
UNLIMITED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """`[controller]`."""

    #: `observe` only looks, `advise` also logs what it would do, `act` does it.
    mode: str = field(default="observe", metadata={"known": ("observe", "advise", "act")})
    #: Who starts pending elastic jobs: `slurm`, or the `controller` by BeginTime leases.
    queue: str = field(default="slurm", metadata={"known": ("slurm", "controller")})
    #: Who gets what: an installed policy (docs/policies.md).
    policy: str = "fair"
    #: Seconds between rounds; a job's arrival or end starts one at once.
    interval_s: float = field(default=30.0, metadata={"min": 1.0, "max": 3600.0})
    #: Seconds between looks at the job list while nothing happens.
    poll_s: float = field(default=2.0, metadata={"min": 0.5, "max": 3600.0})
    #: Partitions whose elastic jobs are managed; empty: all.
    partitions: tuple[str, ...] = ()
    #: Where the ledger lies: a local disk, readable by the controller's account only.
    state_dir: str = "/var/lib/selastic"
    #: Days that past changes and what jobs held are kept, and what is known of jobs that are gone.
    keep_days: float = field(default=90.0, metadata={"min": 1.0, "max": 36500.0})
    #: Megabytes that the ledger may have; from there on what is oldest goes earlier.
    keep_mb: float = field(default=1024.0, metadata={"min": 16.0, "max": 1e6})
    #: Unix users who may command every job, besides root and the controller's own account.
    operators: tuple[str, ...] = ()
    #: With two controllers: seconds without a sign of the active one before the other takes over.
    takeover_s: float = field(default=30.0, metadata={"min": 6.0, "max": 3600.0})
    #: For policies that draw lots; the same seed, the same decisions.
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """`[api]`: the socket for reports, questions and commands."""

    #: Where the daemon listens.
    listen: str = "0.0.0.0:7321"
    #: Where jobs and the command line find it. Several, separated by commas: one of these
    #: daemons is active, the others stand by (docs/install.md).
    controller: str = "localhost:7321"
    #: The Unix account that the daemon runs as; jobs take orders from it and root only.
    user: str = "selastic"
    #: Requests a user may send per second, averaged over ten seconds.
    rate_per_user: float = field(default=200.0, metadata={"min": 1.0, "max": 1e6})

    @property
    def addresses(self) -> tuple[str, ...]:
        """Those named in `controller`."""
        return tuple(a.strip() for a in self.controller.split(",") if a.strip()) or ("",)


@dataclass(frozen=True, kw_only=True)
class ResizeSettings:
    """`[resize]`: when a change is worth its cost."""

    #: A job is left alone for this long after a change.
    min_interval_s: float = field(default=300.0, metadata={"min": 0.0, "max": 1e6})
    #: Most changes per job and hour.
    per_hour: int = field(default=6, metadata={"min": 0, "max": 3600})
    #: A change must pay its cost back within this time.
    payback_s: float = field(default=600.0, metadata={"min": 1.0, "max": 1e6})
    #: Smallest relative gain worth a change.
    min_gain: float = field(default=0.05, metadata={"min": 0.0, "max": 10.0})
    #: Assumed seconds from notice to first step, before one was measured.
    restart_s: float = field(default=15.0, metadata={"min": 0.0, "max": 1e5})
    #: Seconds a job gets to save when its directive says nothing.
    notice_s: float = field(default=60.0, metadata={"min": 1.0, "max": 86400.0})
    #: Transitions under way at once.
    max_in_flight: int = field(default=32, metadata={"min": 1, "max": 10000})
    #: Seconds that freed GPUs are kept for the rigid job they were freed for.
    keep_s: float = field(default=120.0, metadata={"min": 1.0, "max": 86400.0})
    #: Longer time limits for jobs that run on fewer GPUs than submitted (docs/policies.md).
    extend_time: bool = False


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """`[limits]`: what elasticity may take, and when it gives a job up (docs/policies.md)."""

    #: A job is held after so many attempts in a row that came to nothing; 0: never.
    vain_attempts: int = field(default=2, metadata={"min": 0, "max": 1000})
    #: Most resizes an hour of each user's jobs together, and of all; 1000000: no limit. Making
    #: room for a pending job is never refused, but counts.
    resizes_per_user: int = field(default=UNLIMITED, metadata={"min": 0, "max": UNLIMITED})
    resizes: int = field(default=UNLIMITED, metadata={"min": 0, "max": UNLIMITED})
    #: Part of the site's GPUs that jobs may hold beyond their MIN, all of them and each user's.
    share: float = field(default=1.0, metadata={"min": 0.0, "max": 1.0})
    user_share: float = field(default=1.0, metadata={"min": 0.0, "max": 1.0})
    #: The same by partition, of the partition's GPUs, e.g. { gpu = 0.5 }.
    partition_shares: dict[str, float] = field(
        default_factory=dict, metadata={"min": 0.0, "max": 1.0}
    )


@dataclass(frozen=True, kw_only=True)
class SpeedupSettings:
    """`[speedup]`: the curve believed before a job has reported (models/speedup.py)."""

    #: Efficiency lost per doubling inside a node, and beyond.
    loss_in_node: float = field(default=0.04, metadata={"min": 0.0, "max": 1.0})
    loss_across_nodes: float = field(default=0.10, metadata={"min": 0.0, "max": 1.0})
    #: Relative speed of GPU types, e.g. { a100 = 2.0, v100 = 1.0 }; unknown types count 1.
    types: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """`[slurm]`: how slurmctld is talked to."""

    #: Prefix of our reservations; job_submit.lua refuses it to users.
    reservation_prefix: str = "selastic_"
    #: Seconds before a scontrol call counts as failed.
    timeout_s: float = field(default=30.0, metadata={"min": 1.0, "max": 600.0})
    #: Length of a BeginTime lease and of our reservations; renewed while the controller lives.
    lease_s: float = field(default=300.0, metadata={"min": 60.0, "max": 86400.0})


@dataclass(frozen=True, kw_only=True)
class SiaSettings:
    """`[sia]`: the policy `sia` (docs/sia.md); defaults as published."""

    #: Fairness power: below 0 evens the jobs' goodput out, above 0 maximises its sum.
    p: float = field(default=-0.5, metadata={"min": -10.0, "max": 10.0})
    #: What leaving a job without GPUs costs, beside a cost of 1 for its smallest configuration.
    lambda_n: float = field(default=1.1, metadata={"min": 0.0, "max": 1e6})
    #: No configuration costs more than this.
    max_cost: float = field(default=3000.0, metadata={"min": 1.0, "max": 1e9})
    #: Seconds for the integer program; the best answer found by then is used.
    time_limit_s: float = field(default=5.0, metadata={"min": 0.01, "max": 3600.0})
    #: A job grows to at most this many times the most GPUs it was measured on.
    growth: float = field(default=2.0, metadata={"min": 1.0, "max": 1e6})
    #: Whole-node configurations of up to this many nodes; above that, only in growing steps.
    whole_nodes: int = field(default=16, metadata={"min": 1, "max": 10000})
    #: A new job counts on what earlier jobs of the same application were measured at.
    share: bool = False
    #: Decide as the published artifact does where it differs from its paper.
    artifact_compat: bool = False
    #: Single rules of the artifact to follow, by their names in docs/sia.md.
    artifact_rules: tuple[str, ...] = field(
        default=(),
        metadata={
            "known": (
                "batch-cap",
                "first-type",
                "first-observed",
                "restart-constants",
                "restart-window",
                "free-suspension",
                "rounding",
            )
        },
    )
    #: Seconds a restart is taken for by the rule `restart-constants`, by application.
    restart_s: dict[str, float] = field(
        default_factory=lambda: {
            "cifar10": 30.0,
            "deepspeech2": 25.0,
            "bert": 120.0,
            "yolov3": 45.0,
            "imagenet": 250.0,
        }
    )


@dataclass(frozen=True, kw_only=True)
class ElasticBatchSettings:
    """`[elastic_batch]`: the policy `elastic_batch` (docs/elastic_batch.md); defaults as published.

    What the paper leaves out is off: `restart_cost`, `statistical`, `starvation_s`.
    """

    #: Who finds no GPUs when they are divided: waits (`queue`), or is left out for good (`drop`).
    mode: str = field(default="queue", metadata={"known": ("queue", "drop")})
    #: Seconds between two divisions of the GPUs.
    interval_s: float = field(default=600.0, metadata={"min": 0.0, "max": 86400.0})
    #: `elastic` chooses batches, too; the others only GPUs, at the largest batch or a drawn one.
    batch: str = field(
        default="elastic", metadata={"known": ("elastic", "fixed-max", "fixed-random")}
    )
    #: Batches that do not fit into GPU memory at once may be computed in several micro-steps.
    accumulate: bool = False
    #: Count what a restart costs: a change loses restart seconds of the interval ahead.
    restart_cost: bool = False
    #: Goodput instead of throughput: large batches count by what their samples are worth.
    statistical: bool = False
    #: No job waits longer than this while others hold more than MIN; 0: no such guard.
    starvation_s: float = field(default=0.0, metadata={"min": 0.0, "max": 1e7})
    #: A job grows to at most this many times the most GPUs it was measured on.
    growth: float = field(default=2.0, metadata={"min": 1.0, "max": 1e6})
    #: In simulations jobs begin with measured times, as from the paper's scalability analyser.
    analysed: bool = True


@dataclass(frozen=True, kw_only=True)
class LasSettings:
    """`[las]`: the policy `las`, Tiresias' queues (docs/baselines.md)."""

    #: GPU seconds of service from which on a job stands in the second queue.
    queue_gpu_s: float = field(default=3250.0, metadata={"min": 0.0, "max": 1e12})
    #: A job that waited this many times as long as it ran goes back to the first; 0: never.
    promote: float = field(default=0.0, metadata={"min": 0.0, "max": 1e6})
    #: A job that loses this part of its speed on twice the nodes runs on few nodes only.
    pack_loss: float = field(default=0.1, metadata={"min": 0.0, "max": 1.0})


@dataclass(frozen=True, kw_only=True)
class DallySettings:
    """`[dally]`: the policy `dally` (docs/dally.md)."""

    #: How long gangs wait for a near place: `own` is our policy; `auto`, `nowait`, `full`, or two
    #: numbers of leases like `12,24`, are the published one, in its order.
    timers: str = "own"
    #: Seconds after which a running gang bids again.
    lease_s: float = field(default=3600.0, metadata={"min": 1.0, "max": 1e7})
    #: Nobody is preempted, shrunk or moved before it has run so long since its last start, nor
    #: before it has run ten times as long as its restart takes.
    floor_s: float = field(default=600.0, metadata={"min": 0.0, "max": 1e7})
    #: Leases for which waits are remembered to tune the timers.
    history: float = field(default=24.0, metadata={"min": 1.0, "max": 1e6})


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """`[placement]`: whether jobs wait for a near place (docs/dally.md)."""

    #: `near` takes the nearest place there is; `delay` may wait a while for a nearer one.
    mode: str = field(default="near", metadata={"known": ("near", "delay")})
    #: How long: `own`, tuned by the waits there are; `fixed`, `wait_node_s` and `wait_rack_s`;
    #: as published `auto`, `nowait`, `full`, or two numbers of leases like `12,24`.
    timers: str = field(default="own", metadata={"check": "timers"})
    #: Seconds of a lease, in which tuned timers count.
    lease_s: float = field(default=300.0, metadata={"min": 1.0, "max": 1e7})
    #: Seconds after which a job that suffers accepts more nodes than its GPUs take; at least,
    #: with `own`.
    wait_node_s: float = field(default=300.0, metadata={"min": 0.0, "max": 1e7})
    #: Seconds after which it accepts more racks.
    wait_rack_s: float = field(default=900.0, metadata={"min": 0.0, "max": 1e7})
    #: A job that loses at most this part of its speed does not wait.
    tolerance: float = field(default=0.05, metadata={"min": 0.0, "max": 1.0})


@dataclass(frozen=True, kw_only=True)
class TopologySettings:
    """`[topology]`: what Slurm does not tell of the network (docs/topology.md)."""

    #: Gbit/s of a link of each tier: inside a link domain of GPUs, between the domains of a node,
    #: from a node to its rack, from a rack upwards, e.g. { domain = 4800.0, rack = 200.0 }.
    #: They say what distance costs jobs; rack and spine are measured where they are left out.
    speeds: dict[str, float] = field(
        default_factory=dict, metadata={"keys": ("domain", "node", "rack", "spine")}
    )
    #: Gbit/s of single links, from a node or switch upwards, e.g. { "g[01-04]" = 400.0 }.
    uplinks: dict[str, float] = field(default_factory=dict)
    #: GPUs of a link domain (NVLink, one PCIe switch), by node or GPU type, e.g. { a100 = 4 };
    #: before what Links= in gres.conf says.
    domains: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole file."""

    controller: ControllerSettings = field(default_factory=ControllerSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    resize: ResizeSettings = field(default_factory=ResizeSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    speedup: SpeedupSettings = field(default_factory=SpeedupSettings)
    sia: SiaSettings = field(default_factory=SiaSettings)
    elastic_batch: ElasticBatchSettings = field(default_factory=ElasticBatchSettings)
    las: LasSettings = field(default_factory=LasSettings)
    dally: DallySettings = field(default_factory=DallySettings)
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    topology: TopologySettings = field(default_factory=TopologySettings)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)


def load(path: Path = DEFAULT_PATH, *, policies: tuple[str, ...] = ()) -> Config:
    """Read a file.

    Args:
        path: the file.
        policies: names that `policy` may have; empty: not checked.

    Raises:
        ConfigError: unreadable, not TOML, or a value that cannot be.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(f"{path}: {reason}; name another file with --config") from None
    return parse(text, name=path.name, policies=policies)


def parse(text: str, *, name: str = "elastic.toml", policies: tuple[str, ...] = ()) -> Config:
    """Parse the text of a configuration; see `load`."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of 5,000 digits are ValueErrors
        raise ConfigError(f"{name}: {error}") from None
    sections = {}
    types = get_type_hints(Config)
    for section, content in data.items():
        where = where_is(text, name, section)
        if section not in types:
            known = ", ".join(types)
            raise ConfigError(f"{where}: section [{section[:40]}] is unknown; known: {known}")
        if not isinstance(content, dict):
            raise ConfigError(f"{where}: {section} must be a section: write [{section}]")
        sections[section] = read_section(types[section], section, content, text, name)
    config = Config(**sections)
    policy = config.controller.policy
    if policies and policy not in policies:
        where = where_is(text, name, "controller", "policy")
        raise ConfigError(f'{where}: policy "{policy}" is unknown; known: {", ".join(policies)}')
    return config
