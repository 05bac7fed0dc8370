"""The protocol of a policy: what a site's own policy may rely on, and how policies are loaded.

A policy is pure: the same question and state give the same proposals. State that it needs in
later rounds (attained service, timers, shares) is returned, as a JSON-serialisable mapping that
the controller keeps. All that a policy needs is imported from this module; it is installed with
an entry point of the group `slurm_elastic.policies` (docs/policy-plugins.md).

A complete policy, which gives each job its smallest size, first come, first served:

    >>> class Smallest:
    ...     capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")
    ...
    ...     def __init__(self, config): ...
    ...
    ...     def decide(self, question, state):
    ...         free = dict(question.capacity)
    ...         proposals = []
    ...         for job, record, directive in question.elastic():
    ...             ranked = [Alternative(gpu_type="", gpus=0, value=0.0)]  # the last: to wait
    ...             for gpu_type in directive.types or free:
    ...                 sizes = directive.sizes(gpu_type)  # ascending
    ...                 if sizes and sizes[0] <= free.get(gpu_type, 0):
    ...                     free[gpu_type] -= sizes[0]
    ...                     best = Alternative(gpu_type=gpu_type, gpus=sizes[0], value=1.0)
    ...                     ranked.insert(0, best)
    ...                     break
    ...             proposals.append(Proposal(job_id=job.job_id, alternatives=tuple(ranked)))
    ...         return tuple(proposals), state

Asked about one job on a cluster with three free GPUs:

    >>> directive = Directive(min_gpus=2, max_gpus=4)
    >>> job = Job(job_id=7, display_id="7", name="net", user="alice", uid=1000,
    ...           state=JobState.PENDING, partition="gpu", override=directive)
    >>> question = Question(
    ...     snapshot=Snapshot(time=0.0, nodes=(), jobs=(job,)),
    ...     records={7: JobRecord(job_id=7)},
    ...     models={},
    ...     jobs=(7,),
    ...     capacity={"a100": 3},
    ... )
    >>> (proposal,), state = Smallest(Config()).decide(question, {})
    >>> [(a.gpu_type, a.gpus) for a in proposal.alternatives]
    [('a100', 2), ('', 0)]
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, Protocol, get_args

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Job, JobState, Node, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.gpu_parts import HalfOptions
from slurm_elastic.core.plan import Alternative, FreeCapacity, JobRecord, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.models.speedup import SpeedModel

__all__ = [
    "GROUP",
    "Allocation",
    "Alternative",
    "Capabilities",
    "Config",
    "Directive",
    "FreeCapacity",
    "HalfOptions",
    "Job",
    "JobRecord",
    "JobState",
    "Node",
    "Policy",
    "PolicyError",
    "Proposal",
    "Question",
    "Reason",
    "Snapshot",
    "SpeedModel",
    "capabilities_of",
    "known",
    "load",
]

#: Entry point group of policies.
GROUP = "slurm_elastic.policies"

BatchChooser = Literal["controller", "policy", "user"]

_UNKNOWN_KEYWORD = re.compile(
    r"Capabilities\.__init__\(\) got an unexpected keyword argument '(.+)'"
)
#: Least similarity (difflib's ratio) at which a known name is suggested for a misspelt one.
_ALIKE = 0.8


class PolicyError(InvalidInputError):
    """A policy cannot be used; the message names policy, culprit and remedy."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Needs of a policy, and parts of a round that it takes over; checked when it is loaded.

    Attributes:
        binding_proposals: the policy has weighed what each change costs: the first alternative
            for which there is room is carried out. False: placement makes a change only if its
            gain exceeds its cost.
        allows_repacking: running jobs may change nodes, not size, to make room for a proposal
            (binding proposals in simulations only).
        batch_chosen_by: of jobs with `batch=MIN-MAX`: `controller` chooses the batch of best
            goodput on the GPUs held; `policy` sets `Alternative.batch`; `user` keeps the batch of
            the script.
        predicts_frozen_layers: predictions assume the frozen prefix of best effective progress
            (`models.effective_progress.prefix`), and jobs freeze exactly that. False: jobs freeze
            the longest prefix that they may.
        measured_speeds: simulated jobs report plain speeds (`JobRecord.measurements`), as live
            jobs always do. None: if proposals are not binding.
        initial_measurements: simulated jobs begin with measured step times, as if analysed before
            submission (`simulator.scalability_analyser`).
        shares_measurements: new jobs begin with the pool of their application's measurements
            (`models.application_pool`). False: as `[sia] share` says.
        residual_models: goodput models correct their fits by what these leave over
            (`models.step_residuals`).
        predicted_lengths: simulated jobs have predicted run times (`JobRecord.length`), as live
            ones have where `[durations]` is on.
        weighs_halves: it decides which jobs share a GPU (`Question.halves`). False: only those
            do that wait where nothing is free.
    """

    binding_proposals: bool = False
    allows_repacking: bool = True
    batch_chosen_by: BatchChooser = "controller"
    predicts_frozen_layers: bool = False
    measured_speeds: bool | None = None
    initial_measurements: bool = False
    shares_measurements: bool = False
    residual_models: bool = False
    predicted_lengths: bool = False
    weighs_halves: bool = False

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            PolicyError: one is not of its type.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            allowed: tuple[object, ...] = (True, False)
            if field.name == "batch_chosen_by":
                allowed = get_args(BatchChooser)
            elif field.name == "measured_speeds":
                allowed = (True, False, None)
            # 1 == True, hence the comparison of types.
            if not any(type(value) is type(a) and value == a for a in allowed):
                raise PolicyError(
                    f"capability {field.name}: {value!r} is invalid: expected one of"
                    f" {', '.join(map(repr, allowed))}"
                )

    @property
    def simulates_measured_speeds(self) -> bool:
        """Whether simulated jobs report plain speeds."""
        if self.measured_speeds is None:
            return not self.binding_proposals
        return self.measured_speeds


_DEFAULTS = Capabilities()
#: Attributes of release 0.1 with a value other than the default, and what replaces them.
_REPLACED = {
    ("analysed", True): "initial_measurements=True",
    ("batches", True): 'batch_chosen_by="policy"',
    ("decisive", True): "binding_proposals=True",
    ("freezes", True): "predicts_frozen_layers=True",
    ("measures", False): "measured_speeds=False",
    ("measures", True): "measured_speeds=True",
    ("moves", False): "allows_repacking=False",
    ("tunes", False): 'batch_chosen_by="user"',
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question to a policy, for one round; immutable values only.

    Attributes:
        jobs: ids of the elastic jobs to decide on: running, or waiting under the controller's
            lease.
        capacity: GPUs by type that these jobs may hold together: free ones and their own,
            less those kept for others.
        models: speed of each job in any shape.
        seed: for policies that draw lots.
        free: capacity of each node once all changes under way are done, for policies that choose
            places; None: what the snapshot shows as free.
        halves: which jobs may share a GPU, for policies that weigh that; None: none may.
    """

    snapshot: Snapshot
    records: Mapping[int, JobRecord]
    models: Mapping[int, SpeedModel]
    jobs: tuple[int, ...]
    capacity: Mapping[str, int]
    seed: int = 0
    free: FreeCapacity | None = None
    halves: HalfOptions | None = None

    @property
    def round_seed(self) -> int:
        """Seed of this round's draws, below 2^31."""
        return (self.seed * 1_000_003 + int(self.snapshot.time)) % (1 << 31)

    def elastic(self) -> Iterator[tuple[Job, JobRecord, Directive]]:
        """Iterate over its jobs, with what is known of each and the directive in force."""
        for job_id in self.jobs:
            job = self.snapshot.job[job_id]
            record = self.records.get(job_id) or JobRecord(job_id=job_id)
            if job.directive is not None:
                yield job, record, job.directive


class Policy(Protocol):
    """One published system, or our own; need not be subclassed.

    Attributes:
        capabilities: what it does itself and needs; of the class, or set in `__init__`. A policy
            without it has the defaults.
    """

    capabilities: Capabilities = Capabilities()

    def __init__(self, config: Config) -> None: ...

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; the present shape among them.

        Args:
            question: of this round; a round may ask several times, with fewer jobs.
            state: as returned in the last round; {} in the first.

        Returns:
            A proposal for each job, and the state for the next round, JSON-serialisable.
        """
        ...


def capabilities_of(policy: object) -> Capabilities:
    """Return the capabilities of a policy; the defaults if it states none."""
    value: Capabilities = getattr(policy, "capabilities", _DEFAULTS)
    return value


def known() -> tuple[str, ...]:
    """Return the names of the installed policies, sorted."""
    return tuple(sorted({e.name for e in entry_points(group=GROUP)}))


def load(config: Config) -> Policy:
    """Return the policy that the configuration names, its capabilities checked.

    Raises:
        PolicyError: it is not installed, or states something unknown of itself.
        ConfigError: its settings are invalid.
    """
    name = config.controller.policy
    entry = next((e for e in entry_points(group=GROUP) if e.name == name), None)
    if entry is None:
        raise PolicyError(
            f"[controller] policy: {name!r} is invalid: expected one of {', '.join(known())}"
        )
    where = f"policy {name} ({entry.value})"
    try:
        policy: Policy = entry.load()(config)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None
    except ImportError as error:
        raise PolicyError(f"{where}: cannot be imported: {error}; install it again") from error
    except TypeError as error:
        misspelt = _UNKNOWN_KEYWORD.search(str(error))
        if misspelt is None:
            raise
        raise PolicyError(f"{where}: {_unknown_capability(misspelt[1])}") from None
    _check(policy, where)
    return policy


def _check(policy: object, where: str) -> None:
    """Refuse a policy that states something unknown of itself.

    Raises:
        PolicyError: see `load`.
    """
    if not callable(getattr(policy, "decide", None)):
        raise PolicyError(f"{where}: it has no method decide; expected decide(question, state)")
    stated = getattr(policy, "capabilities", _DEFAULTS)
    if not isinstance(stated, Capabilities):
        unknown = sorted(set(stated) - set(_names())) if isinstance(stated, Mapping) else ()
        tail = f"; {_unknown_capability(unknown[0])}" if unknown else ""
        raise PolicyError(
            f"{where}: capabilities: {type(stated).__name__} is invalid:"
            f" expected Capabilities(...){tail}"
        )
    for attribute in dir(policy):
        if attribute == "capabilities" or attribute.startswith("_"):
            continue
        value = inspect.getattr_static(policy, attribute)
        if isinstance(value, Capabilities) or _alike(attribute, ("capabilities",)):
            raise PolicyError(
                f"{where}: the attribute {attribute!r} is unknown; did you mean 'capabilities'?"
            )
        if isinstance(value, bool) and attribute in {old for old, _ in _REPLACED}:
            new = _REPLACED.get((attribute, value))
            remedy = f"write capabilities = Capabilities({new})" if new else "remove it"
            raise PolicyError(
                f"{where}: the attribute {attribute} = {value} of release 0.1 is unknown; {remedy}"
            )


def _unknown_capability(name: str) -> str:
    nearest = _alike(name, _names())
    hint = f"did you mean {nearest!r}?" if nearest else f"known: {', '.join(_names())}"
    return f"the capability {name!r} is unknown; {hint}"


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Capabilities))


def _alike(name: str, names: tuple[str, ...]) -> str:
    """Return the nearest of these names, "" if none is near."""
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=_ALIKE)), "")
