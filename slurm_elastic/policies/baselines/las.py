"""Policy `las`: Tiresias' discretised two-dimensional least attained service.

Gu et al., NSDI'19, section 3.2: a job's attained service is its GPUs times the seconds it held
them. Jobs below a threshold are in the first of two queues, the others in the second; inside
a queue they go in the order of their first start (jobs that never started: of their arrival,
after those). A job that does not fit is passed over; one beyond the room is preempted. A job that
has waited `promote` times as long as it ran goes back to the first queue with both counters at
0 (PROMOTEKNOB). The paper leaves threshold and knob to the site; the defaults (3,250 GPU
seconds, no promotion) are those of simulators of Tiresias in public use.

Consolidation (section 3.3) asks whether a job's tensors are skewed; what is known here is its
speed: a job that loses more than `pack_loss` on twice the fewest nodes counts as skewed and runs
only on types where it needs the fewest nodes. Placement chooses the nodes, and consolidates all
jobs (our reading).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import (
    Pool,
    RigidRequest,
    Shape,
    arrival,
    elapsed,
    proposal,
    requests,
    waits,
)
from slurm_elastic.policies.policy_protocol import Capabilities, Question


class LeastAttainedService:
    """The policy; its state is each job's service (GPU s), run and waiting time (s) and start."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")

    def __init__(self, config: Config) -> None:
        self._las = config.las

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank jobs by queue, then by first start; see the module."""
        books = self._account(question, state)
        pool = Pool(question.capacity)
        proposals = []
        per_node = question.snapshot.per_node
        for request in sorted(requests(question), key=lambda r: self._order(r, books)):
            first = books[request.job.key]["service"] < self._las.queue_gpu_s
            chosen = pool.first(self._shapes(request, question, per_node))
            if chosen:
                pool.take(chosen)
                reason = Reason("queue-turn", queue=1 if first else 2)
            else:
                reason = waits(request) if not request.held else Reason("others-less-served")
            proposals.append(proposal(request, chosen, reason, float(first)))
        return tuple(proposals), {"time": question.snapshot.time, "jobs": books}

    def _account(self, question: Question, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the counters up to now of every job that still exists."""
        now, since = question.snapshot.time, state.get("time")
        held = elapsed(question, since)
        books = {}
        for job in question.snapshot.jobs:
            if job.submission is None:
                continue
            book: dict[str, Any] = {"service": 0.0, "ran": 0.0, "waited": 0.0, "started": None}
            book |= state.get("jobs", {}).get(job.key, {})
            if job.allocation is not None:
                book["service"] += held[job.key] * job.allocation.gpus
                book["ran"] += held[job.key]
                if book["started"] is None:
                    book["started"] = now if job.start_time is None else job.start_time
            elif since is not None:
                book["waited"] += max(0.0, now - max(since, arrival(job)))
            starved = book["service"] >= self._las.queue_gpu_s and self._las.promote > 0
            if starved and book["waited"] >= self._las.promote * book["ran"]:
                book |= {"service": 0.0, "ran": 0.0, "waited": 0.0}
            books[job.key] = book
        return books

    def _order(
        self, request: RigidRequest, books: Mapping[str, Any]
    ) -> tuple[bool, bool, float, int]:
        book = books[request.job.key]
        start = book["started"]
        never = start is None
        return (
            book["service"] >= self._las.queue_gpu_s,
            never,
            arrival(request.job) if never else start,
            request.job.job_id,
        )

    def _shapes(
        self, request: RigidRequest, question: Question, per_node: Mapping[str, int]
    ) -> tuple[Shape, ...]:
        """Return its shapes: the type that it has first, and if it is skewed, on few nodes only."""
        shapes = request.staying_first
        model = question.models[request.job.job_id]
        nodes = {kind: -(-gpus // per_node.get(kind, gpus)) for kind, gpus in shapes}
        fewest = min(nodes.values(), default=1)

        def skewed(kind: str, gpus: int) -> bool:
            wide = min(gpus, 2 * nodes[kind])
            packed = model.speed(kind, gpus, nodes[kind])
            return model.speed(kind, gpus, wide) < (1 - self._las.pack_loss) * packed

        return tuple(s for s in shapes if nodes[s[0]] == fewest or not skewed(*s))
