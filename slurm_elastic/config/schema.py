r"""`elastic.toml`: the schema, its defaults, and errors that name file and line.

>>> parse('[controller]\npolicy = "fair"').controller.interval_s
30.0
>>> parse('[controller]\nmode = "x"', name="my.toml")  # doctest: +ELLIPSIS
Traceback (most recent call last):
slurm_elastic...ConfigError: my.toml:2: mode "x" is unknown; known: observe, advise, act
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from slurm_elastic.config.key import key, section
from slurm_elastic.config.placement_settings import (
    NeighbourSettings,
    PlacementSettings,
    TopologySettings,
)
from slurm_elastic.config.policy_settings import (
    DallySettings,
    ElasticBatchSettings,
    GoodputSettings,
    LasSettings,
    QssfSettings,
    SiaSettings,
)
from slurm_elastic.config.section_reader import ConfigError, read_section, where_is

__all__ = ["DEFAULT_PATH", "UNLIMITED", "Config", "ConfigError", "load", "parse"]

DEFAULT_PATH = Path("/etc/slurm-elastic/elastic.toml")

#: A count that is never reached.
UNLIMITED = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """Section `[controller]`."""

    mode: str = key(
        "observe",
        "`observe` only reads, `advise` also logs what it would do, `act` resizes jobs.",
        choices=("observe", "advise", "act"),
    )
    queue: str = key(
        "slurm",
        "Component that starts pending elastic jobs: `slurm`, or `controller` by BeginTime leases.",
        choices=("slurm", "controller"),
    )
    policy: str = key("fair", "Name of an installed policy (docs/policies.md).")
    interval_s: float = key(
        30.0,
        "Seconds between rounds; the arrival or end of a job starts one at once.",
        bounds=(1, 3600),
    )
    poll_s: float = key(
        2.0, "Seconds between reads of the job list while nothing changes.", bounds=(0.5, 3600)
    )
    partitions: tuple[str, ...] = key((), "Partitions whose elastic jobs are managed; empty: all.")
    state_dir: str = key(
        "/var/lib/selastic",
        "Folder of the ledger: on a local disk, readable by the controller's account only.",
    )
    keep_days: float = key(
        90.0,
        "Days that past changes, usage, and data of jobs that have ended are kept.",
        bounds=(1, 36500),
    )
    keep_mb: float = key(
        1024.0,
        "Largest size of the ledger in megabytes; above it the oldest records are deleted.",
        bounds=(16, 1e6),
    )
    operators: tuple[str, ...] = key(
        (), "Unix users who may command every job, besides root and the controller's account."
    )
    takeover_s: float = key(
        30.0,
        "With two controllers: seconds without a sign of the active one until the other takes"
        " over.",
        bounds=(6, 3600),
    )
    seed: int = key(0, "Seed of policies that draw at random: the same seed, the same decisions.")


@dataclass(frozen=True, kw_only=True)
class ApiSettings:
    """Section `[api]`."""

    listen: str = key("0.0.0.0:7321", "Address on which the daemon listens.")
    controller: str = key(
        "localhost:7321",
        "Address at which jobs and commands reach it. Several, separated by commas: one of these"
        " daemons is active, the others stand by (docs/install.md).",
    )
    user: str = key(
        "selastic", "Unix account of the daemon; jobs take orders from it and from root only."
    )
    rate_per_user: float = key(
        200.0,
        "Requests that a user may send per second, averaged over ten seconds.",
        bounds=(1, 1e6),
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Each address in `controller`."""
        return tuple(a.strip() for a in self.controller.split(",") if a.strip()) or ("",)


@dataclass(frozen=True, kw_only=True)
class ResizeSettings:
    """Section `[resize]`."""

    min_interval_s: float = key(
        300.0, "Seconds after a change in which a job is not changed again.", bounds=(0, 1e6)
    )
    per_hour: int = key(6, "Most changes per job and hour.", bounds=(0, 3600))
    payback_s: float = key(
        600.0, "Seconds within which the gain of a change must cover its cost.", bounds=(1, 1e6)
    )
    min_gain: float = key(0.05, "Smallest relative gain that justifies a change.", bounds=(0, 10))
    restart_s: float = key(
        15.0,
        "Seconds from notice to first step that are assumed until they are measured.",
        bounds=(0, 1e5),
    )
    notice_s: float = key(
        60.0, "Seconds a job gets to save if its directive has no `notice`.", bounds=(1, 86400)
    )
    max_in_flight: int = key(32, "Most transitions under way at once.", bounds=(1, 10000))
    keep_s: float = key(
        120.0,
        "Seconds that freed GPUs are kept for the rigid job they were freed for.",
        bounds=(1, 86400),
    )
    trial_s: float = key(
        600.0,
        "Seconds that a job has at least, after a change, to write a newer checkpoint; without one "
        "the change has failed (docs/reliability-failed-changes.md). 0: no limit.",
        bounds=(0, 1e6),
    )
    in_place: str = key(
        "auto",
        "`auto`: jobs grow and shrink by companion jobs where that can be done, those of the "
        "training library in place, others by a restart of their ranks; `never`: every change is "
        "a requeue (docs/reliability-in-place.md).",
        choices=("auto", "never"),
    )
    plan_trials: float = key(
        0.05,
        "Share of a job's time that restarts for trying execution plans may take, for jobs with"
        " `plan=auto` (docs/training-layouts.md); 0: plans are not tried.",
        bounds=(0, 1),
    )
    extend_time: bool = key(
        False,
        "Extend the time limit of jobs that run on fewer GPUs than submitted (docs/policies.md).",
    )


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Section `[limits]`."""

    vain_attempts: int = key(
        2,
        "A job is held after this many attempts in a row without progress; 0: never.",
        bounds=(0, 1000),
    )
    resizes_per_user: int = key(
        UNLIMITED,
        f"Most resizes per hour of all jobs of a user; {UNLIMITED}: no limit. Making room for a"
        " pending job is never refused, but counts.",
        bounds=(0, UNLIMITED),
    )
    resizes: int = key(
        UNLIMITED, "Most resizes per hour of all jobs of the site.", bounds=(0, UNLIMITED)
    )
    share: float = key(
        1.0, "Fraction of the site's GPUs that all jobs may hold beyond their MIN.", bounds=(0, 1)
    )
    user_share: float = key(
        1.0,
        "Fraction of the site's GPUs that the jobs of a user may hold beyond their MIN.",
        bounds=(0, 1),
    )
    partition_shares: dict[str, float] = key(
        {},
        "Fraction of a partition's GPUs that its jobs may hold beyond their MIN, e.g."
        " { gpu = 0.5 }.",
        bounds=(0, 1),
    )


@dataclass(frozen=True, kw_only=True)
class SpeedupSettings:
    """Section `[speedup]`; see models/speedup.py."""

    loss_in_node: float = key(
        0.04, "Efficiency lost with each doubling of the GPUs inside a node.", bounds=(0, 1)
    )
    loss_across_nodes: float = key(
        0.10, "Efficiency lost with each doubling of the GPUs beyond a node.", bounds=(0, 1)
    )
    types: dict[str, float] = key(
        {},
        "Relative speed of GPU types, e.g. { a100 = 2.0, v100 = 1.0 }; unknown types count 1.",
    )


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """Section `[slurm]`."""

    reader: str = key(
        "auto",
        "How slurmctld is read: `pyslurm`, `json` (the output of Slurm's commands, which costs"
        " more), or `auto`: pyslurm if its release fits.",
        choices=("auto", "pyslurm", "json"),
    )
    reservation_prefix: str = key(
        "selastic_",
        "Prefix of the controller's reservations; job_submit.lua refuses it to users.",
    )
    timeout_s: float = key(30.0, "Seconds after which a scontrol call fails.", bounds=(1, 600))
    lease_s: float = key(
        300.0,
        "Seconds of a BeginTime lease and of a reservation; the running controller renews them.",
        bounds=(60, 86400),
    )


@dataclass(frozen=True, kw_only=True)
class DurationSettings:
    """Section `[durations]`."""

    predict: bool = key(False, "Predict run times of jobs from Slurm's accounting, by sacct.")
    history_days: float = key(60.0, "Days of accounting that are read.", bounds=(1, 3650))
    most_jobs: int = key(
        20_000, "Most GPU jobs that are read, the latest ones.", bounds=(100, 200_000)
    )
    refresh_s: float = key(
        3600.0, "Seconds between trainings, each in a process of its own.", bounds=(60, 1e6)
    )
    timeout_s: float = key(
        120.0, "Seconds after which a training is ended without result.", bounds=(5, 3600)
    )
    boosted: bool = key(
        True, "Learn boosted trees, too, where scikit-learn is installed (the extra `durations`)."
    )
    rigid_nice: int = key(
        0,
        "Most that is added to the nice value of a rigid job that waits for GPUs, by its predicted"
        " GPU time, so that short jobs start first. Needs PriorityType=priority/multifactor."
        " 0: nothing of rigid jobs is ever changed.",
        bounds=(0, 1_000_000),
    )


@dataclass(frozen=True, kw_only=True)
class SleepSettings:
    """Section `[sleep]`."""

    mode: str = key(
        "off",
        "`observe`: count how long which idle nodes could have slept, and which starts would have"
        " waited for a boot. `act`: switch them off and on through Slurm's power saving, while"
        " `[controller] mode` is `act`, too.",
        choices=("off", "observe", "act"),
    )
    window_s: float = key(
        7200.0, "Seconds for which a node stays awake after it was in use.", bounds=(10, 86400)
    )
    spare: int = key(1, "Idle nodes of each GPU type that stay awake.", bounds=(0, 10_000))
    cycles_per_day: int = key(
        4, "Most times that a node is switched off in 24 hours.", bounds=(1, 1000)
    )
    grow_boots: float = key(
        6.0,
        "A job grows onto a sleeping node if it has at least this multiple of ResumeTimeout left.",
        bounds=(1, 1e6),
    )
    clear_s: float = key(
        0.0,
        "Elastic jobs move to nodes in use, so that theirs can sleep, if they lose little of the"
        " time that they have left; of that at most these seconds count. 0: never.",
        bounds=(0, 1e7),
    )
    served: float = key(
        0.998,
        "Part of the time in which no start shall wait for a boot; c / (1 + c) where a waiting"
        " node costs c times an idle one.",
        bounds=(0.5, 0.9999),
    )
    idle_watts: float = key(
        500.0, "Watts of an idle node, less those of a sleeping one.", bounds=(0, 1e5)
    )
    price_per_kwh: float = key(
        0.0, "Price of a kWh, in any currency; 0: no costs.", bounds=(0, 1e3)
    )
    boot_s: float = key(
        600.0, "Seconds of a boot, which delay a start that waits for it.", bounds=(1, 86400)
    )


def _metrics_address(value: str) -> None:
    host, colon, port = value.rpartition(":")
    if value and not (host and colon and port.isascii() and port.isdigit() and int(port) < 65536):
        raise ValueError("HOST:PORT, e.g. 127.0.0.1:9341, or empty")


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Section `[metrics]`."""

    listen: str = key(
        "",
        "Address of `/metrics` for Prometheus, e.g. 127.0.0.1:9341 (docs/metrics.md); empty: none.",
        parse=_metrics_address,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole file."""

    controller: ControllerSettings = section(ControllerSettings, "rounds, policy and ledger")
    api: ApiSettings = section(ApiSettings, "socket for reports, questions and commands")
    resize: ResizeSettings = section(ResizeSettings, "when a change is worth its cost")
    limits: LimitSettings = section(
        LimitSettings, "how much elasticity may use, and when a job is held (docs/policies.md)"
    )
    speedup: SpeedupSettings = section(
        SpeedupSettings, "speed that is assumed before a job has reported"
    )
    sia: SiaSettings = section(SiaSettings, "policy `sia` (docs/sia.md); defaults as published")
    goodput: GoodputSettings = section(GoodputSettings, "policy `goodput` (docs/goodput.md)")
    elastic_batch: ElasticBatchSettings = section(
        ElasticBatchSettings,
        "policy `elastic_batch` (docs/elastic_batch.md); defaults as published",
    )
    las: LasSettings = section(LasSettings, "policy `las`, Tiresias' queues (docs/baselines.md)")
    durations: DurationSettings = section(
        DurationSettings, "predicted run times (docs/durations.md)"
    )
    sleep: SleepSettings = section(SleepSettings, "idle nodes that could sleep (docs/sleep.md)")
    qssf: QssfSettings = section(
        QssfSettings, "policy `qssf`, by predicted GPU time (docs/durations.md)"
    )
    dally: DallySettings = section(DallySettings, "policy `dally` (docs/dally.md)")
    placement: PlacementSettings = section(
        PlacementSettings, "whether jobs wait for a near place (docs/dally.md)"
    )
    neighbours: NeighbourSettings = section(
        NeighbourSettings, "jobs that slow each other down on one node (docs/colocation.md)"
    )
    topology: TopologySettings = section(
        TopologySettings, "network properties that Slurm does not report (docs/topology.md)"
    )
    slurm: SlurmSettings = section(SlurmSettings, "calls to slurmctld")
    metrics: MetricsSettings = section(MetricsSettings, "totals for Prometheus (docs/metrics.md)")


def load(path: Path = DEFAULT_PATH, *, policies: tuple[str, ...] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: the file.
        policies: valid names of `policy`; empty: not checked.

    Raises:
        ConfigError: unreadable, not TOML, or an invalid value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(f"{path}: {reason}; name another file with --config") from None
    return parse(text, name=path.name, policies=policies)


def parse(text: str, *, name: str = "elastic.toml", policies: tuple[str, ...] = ()) -> Config:
    """Parse the text of a configuration; `name` stands for the file in errors; see `load`."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also integers with too many digits
        raise ConfigError(f"{name}: {error}") from None
    sections = {}
    types = get_type_hints(Config)
    for title, content in data.items():
        location = where_is(text, name, title)
        if title not in types:
            sections_with_key = ", ".join(
                f"[{s}]" for s, t in types.items() if title in get_type_hints(t)
            )
            if sections_with_key and not isinstance(content, dict):
                raise ConfigError(
                    f"{location}: {title} is outside its section: put it in {sections_with_key}"
                )
            known_sections = ", ".join(types)
            raise ConfigError(
                f"{location}: section [{title[:40]}] is unknown; known: {known_sections}"
            )
        if not isinstance(content, dict):
            raise ConfigError(f"{location}: {title} must be a section; write [{title}]")
        sections[title] = read_section(types[title], title, content, text, name)
    config = Config(**sections)
    policy = config.controller.policy
    if policies and policy not in policies:
        location = where_is(text, name, "controller", "policy")
        raise ConfigError(f'{location}: policy "{policy}" is unknown; known: {", ".join(policies)}')
    if config.neighbours.share_gpus == "act" and config.neighbours.mode == "off":
        location = where_is(text, name, "neighbours", "share_gpus")
        raise ConfigError(
            f'{location}: share_gpus "act" needs the speeds of pairs, and mode "off" measures none;'
            ' set mode to "observe" or "act", or share_gpus to "off"'
        )
    return config
