"""Properties of the policies `sia`, `icefrog` and `goodput` on random clusters and jobs."""

import dataclasses
import json
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import (
    Application,
    LayerCost,
    Learned,
    Noise,
    Observation,
    Prefixes,
    TypeProfile,
)
from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Allocation, Limit
from slurm_elastic.core.plan import Action
from slurm_elastic.core.submission import Submission
from slurm_elastic.placement import best_fit
from slurm_elastic.placement.free_resources import ResourceNeed, limit_use
from slurm_elastic.policies.goodput import round_limits, wait_bound
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.icefrog.icefrog import IceFrog
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.sia_strategies import (
    CASES,
    TYPES,
    random_cluster,
    random_config,
    random_question,
)
from tests.support.decisions.synthetic_clusters import Cluster, node


def check_proposals(asked, proposals):
    """Check that first choices fit together, and that all choices are allowed and have reasons."""
    assert {p.job_id for p in proposals} == set(asked.jobs)
    used = dict.fromkeys(TYPES, 0)
    for proposal in proposals:
        job = asked.snapshot.job[proposal.job_id]
        for alternative in proposal.alternatives:
            assert words(alternative.reason)
            if alternative.gpus:
                assert job.directive.allows(alternative.gpus, alternative.gpu_type)
        best = proposal.alternatives[0]
        if best.gpus:
            used[best.gpu_type] += best.gpus
    assert all(used[t] <= asked.capacity[t] for t in TYPES)


def check_capacity(plan, snapshot):
    """Check that a plan gives each node at most the GPUs that it has."""
    used = {n.name: 0 for n in snapshot.nodes}
    for decision in plan.decisions:
        for name, gpus in decision.target.shares if decision.target else ():
            used[name] += gpus
    assert all(used[n.name] <= n.gpus for n in snapshot.nodes)


def check_limits(before, after):
    """Check that no limit is exceeded by more than it was before."""
    for limit in after.limits:
        used = [
            sum(
                limit_use(limit, ResourceNeed.of(job), job.allocation)
                for job in snapshot.jobs
                if job.job_id in limit.jobs and job.allocation
            )
            for snapshot in (before, after)
        ]
        assert used[1] <= max(limit.cap, used[0])


def freezing(rng, cluster, share=0.7):
    """Draw freezable layers for most jobs with measurements."""
    for job_id, record in cluster.records.items():
        if record.learned is None or rng.random() > share:
            continue
        layers = rng.randint(2, 30)
        certified = rng.randint(0, layers)
        named = sorted(rng.sample(range(1, layers + 1), min(layers, rng.randint(0, 3))))
        known = rng.random() < 0.8
        prefixes = Prefixes(
            layers=layers,
            certified=certified,
            frozen=rng.randint(0, certified),
            penalties=tuple((n, rng.random() ** 4) for n in named),
            max_penalty=rng.choice([0.0, 0.005, 0.5, 1.0]),
            costs=tuple(
                LayerCost(rng.uniform(0.1, 1), rng.uniform(0.1, 2), rng.uniform(0, 9))
                for _ in range(layers * known)
            ),
        )
        learned = dataclasses.replace(record.learned, prefixes=prefixes)
        cluster.records[job_id] = dataclasses.replace(record, learned=learned)


def scaling(rng):
    """Draw measurements of a job on one to eight GPUs, from hardly to fully scalable."""
    single, lost = rng.uniform(1, 1000), rng.uniform(0, 1)
    application = Application(
        name=f"app{rng.randint(0, 1000)}",
        initial_batch=64,
        max_batch=4096,
        batch=256,
        types=tuple(
            TypeProfile(kind, least=1, most=64, single=single * part)
            for kind, part in (("a100", 1.0), ("t4", rng.uniform(0.2, 1.0)))
        ),
    )
    micro = 64 / single
    observations = tuple(
        Observation("a100", 1, g, 64, micro * (1 + lost * (g - 1)), micro) for g in (1, 2, 4, 8)
    )
    return Learned(application, observations, Noise(1.0, rng.uniform(0.1, 1e4)))


def goodput_config(rng):
    return dataclasses.replace(
        random_config(rng),
        goodput=GoodputSettings(
            p=rng.choice([0.2, 0.5, 1.0]),
            charge=rng.choice([0.0, 0.25, 1.0]),
            hysteresis=rng.choice([0.0, 0.05, 0.5]),
            growth=rng.choice([1.0, 2.0, 64.0]),
            prices=rng.choice([{}, {"t4": 0.3}]),
            lengths=rng.random() < 0.7,
            wait_s=rng.choice([0.0, 600.0, 3600.0]),
            profiles=rng.choice([0, 2]),
        ),
    )


def with_types_and_limits(rng, cluster):
    """Forbid some elastic jobs all types but a few, and draw limits of Slurm and of the site."""
    for i, job in enumerate(cluster.jobs):
        if job.directive and rng.random() < 0.4:
            own = [job.allocation.gpu_type] if job.allocation else []
            allowed = sorted({*own, *rng.sample(TYPES, rng.randint(1, 2))})
            directive = dataclasses.replace(job.directive, types=tuple(allowed))
            cluster.jobs[i] = dataclasses.replace(job, submission=Submission(directive))
    resources = ["gpu", "gpu", "gpu:a100", "node", "cpu", "mem", GPUS_OF_A_NODE]
    for i in range(rng.choice([0, 1, 2, 3])):
        resource = rng.choice(resources)
        members = [j for j in cluster.jobs if rng.random() < 0.6]
        of_site = resource == "gpu" and rng.random() < 0.5
        limit = Limit(
            name=f"limit {i}",
            resource=resource,
            cap=rng.randint(1, 20) * {"mem": 8_000, "cpu": 2}.get(resource, 1),
            jobs=frozenset(j.job_id for j in members),
            spared={j.job_id: j.directive.min_gpus for j in members} if of_site else {},
            scope="site" if of_site else "",
        )
        cluster.limits += (limit,)


def check_first_choices_in_limits(asked, proposals):
    """Check that first choices together exceed no limit on GPUs by more than jobs do already."""
    chosen = {p.job_id: p.alternatives[0] for p in proposals}
    for limit in asked.snapshot.limits:
        if not limit.resource.startswith("gpu") or limit.resource == GPUS_OF_A_NODE:
            continue  # nodes, and what is counted on each, are chosen by placement
        used = held = 0
        for job_id in limit.jobs & chosen.keys():
            job, choice = asked.snapshot.job[job_id], chosen[job_id]
            need = ResourceNeed.of(job)
            held += limit_use(limit, need, job.allocation) if job.allocation else 0
            place = Allocation.of(choice.gpu_type, {"n": choice.gpus}) if choice.gpus else None
            used += limit_use(limit, need, place) if place else 0
        assert used <= max(limit.cap, held)


def random_state(rng, asked):
    """Draw since when jobs wait, and the account of their work."""
    now, keys = asked.snapshot.time, [j.key for j in asked.snapshot.jobs]
    return {
        "waits": {k: now - rng.uniform(0, 7200) for k in keys if rng.random() < 0.7},
        "work": {
            "time": now - 60.0,
            "asked": [k for k in keys if rng.random() < 0.8],
            "jobs": {
                k: [rng.random(), rng.uniform(0, 100), 10 ** rng.uniform(-3, 9), rng.random()]
                for k in keys
                if rng.random() < 0.6
            },
        },
    }


def with_progress(rng, cluster):
    for job_id, record in cluster.records.items():
        progress = rng.choice([None, 0.0, rng.random(), 1.0])
        cluster.records[job_id] = dataclasses.replace(
            record, progress=progress, last_change=cluster.time - rng.uniform(0, 7200)
        )


@settings(max_examples=150)
@given(*CASES)
def test_sia_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    asked = random_question(cluster, seed)
    proposals, state = Sia(config).decide(asked, {})
    check_proposals(asked, proposals)
    for proposal in proposals:
        shapes = [(a.gpu_type, a.gpus) for a in proposal.alternatives]
        assert len(shapes) == len(set(shapes))
        running = asked.snapshot.job[proposal.job_id].allocation is not None
        assert shapes[-1] == ("", 0) or running
    again, _ = Sia(config).decide(asked, json.loads(json.dumps(state)))
    assert again == proposals


@settings(max_examples=100)
@given(*CASES)
def test_icefrog_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    freezing(rng, cluster)
    asked = random_question(cluster, seed)
    proposals, state = IceFrog(config).decide(asked, {})
    check_proposals(asked, proposals)
    for proposal in proposals:
        reason = words(proposal.alternatives[0].reason)
        if "frozen" in reason:
            prefixes = cluster.records[proposal.job_id].learned.prefixes
            frozen = int(reason.partition("layers 1-")[2].partition(" ")[0])
            assert 0 < frozen <= min(prefixes.certified, prefixes.layers - 1)
            assert dict(prefixes.penalties)[frozen] <= prefixes.max_penalty
    assert IceFrog(config).decide(asked, dict(state))[0] == proposals


@settings(max_examples=150)
@given(*CASES)
def test_goodput_keeps_to_capacity_and_directives_and_repeats_itself(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    with_types_and_limits(rng, cluster)
    asked = random_question(cluster, seed)
    before = random_state(rng, asked)
    proposals, state = MarginalValue(config).decide(asked, before)
    check_proposals(asked, proposals)
    check_first_choices_in_limits(asked, proposals)
    again, same = MarginalValue(config).decide(asked, json.loads(json.dumps(before)))
    assert again == proposals
    assert json.loads(json.dumps(same)) == json.loads(json.dumps(state))


@settings(max_examples=60)
@given(*CASES)
def test_removing_a_job_never_breaks_a_round_of_sia(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs + 1)
    policy = Sia(config)
    policy.decide(random_question(cluster, seed), {})
    proposals, _ = policy.decide(
        random_question(cluster, seed, leave_out=rng.randint(1, jobs + 1)), {}
    )
    assert len(proposals) == jobs


@settings(max_examples=60)
@given(*CASES, st.booleans())
def test_without_freezable_jobs_icefrog_decides_as_sia(nodes, jobs, seed, certified):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    if certified:
        freezing(rng, cluster)
        for job_id, record in cluster.records.items():
            if record.learned is not None and record.learned.prefixes is not None:
                none = dataclasses.replace(record.learned.prefixes, penalties=())
                learned = dataclasses.replace(record.learned, prefixes=none)
                cluster.records[job_id] = dataclasses.replace(record, learned=learned)
    asked = random_question(cluster, seed)
    assert IceFrog(config).decide(asked, {}) == Sia(config).decide(asked, {})


@settings(max_examples=150)
@given(*CASES)
def test_an_overdue_job_waits_only_while_others_entitled_hold_all_it_could_use(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    config = dataclasses.replace(
        config, goodput=dataclasses.replace(config.goodput, wait_s=rng.choice([1.0, 1800.0]))
    )
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    with_types_and_limits(rng, cluster)
    cluster.jobs = [
        dataclasses.replace(job, start_time=cluster.time - rng.uniform(0, 7200))
        if job.allocation
        else job
        for job in cluster.jobs
    ]
    asked = random_question(cluster, seed)
    before = random_state(rng, asked)
    policy = MarginalValue(config)
    proposals, state = policy.decide(asked, before)
    chosen = {p.job_id: p.alternatives[0] for p in proposals}
    arrays = policy.weigh(asked).table
    columns, candidates = arrays.configurations, arrays.candidates
    limits = round_limits.limit_rows(asked, arrays)
    taken = np.full(len(candidates), -1)
    smallest = wait_bound.smallest_columns(arrays)
    wait_s, now = config.goodput.wait_s, asked.snapshot.time

    def overdue(job):
        waits = state["waits"].get(job.job.key, now)
        return job.held is None and now - waits >= wait_s

    entitled = np.array([asked.capacity[t] for t in columns.types])
    for row, job in enumerate(candidates):
        recent = job.job.start_time is not None and job.job.start_time + wait_s > now
        if job.held is not None and (config.controller.queue == "slurm" or recent):
            if arrays.held[row] < 0:
                continue
            kind = columns.kind[arrays.held[row]]
            options = [c for c in (smallest[row, kind], arrays.held[row]) if c >= 0]
            taken[row] = min(options, key=lambda c: columns.gpus[c])
            entitled[kind] -= columns.gpus[taken[row]]
        elif overdue(job) and chosen[job.job.job_id].gpus:
            best = chosen[job.job.job_id]
            kind = columns.types.index(best.gpu_type)
            entitled[kind] -= best.gpus
            shape = (columns.kind == kind) & (columns.gpus == best.gpus) & arrays.valid[row]
            taken[row] = np.flatnonzero(shape)[0]
    for row, job in enumerate(candidates):
        if overdue(job) and not chosen[job.job.job_id].gpus:
            for kind, column in enumerate(smallest[row]):
                rest = wait_bound.LimitRoom(limits, taken, [row])
                if column >= 0 and rest.fits(row, int(column)):
                    assert columns.gpus[column] > entitled[kind]


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(TYPES), min_size=1, unique=True), min_size=1, max_size=4),
    st.sampled_from(["slurm", "controller"]),
)
def test_no_job_measures_a_type_that_its_user_forbids(allowed, queue):
    config = Config(
        controller=ControllerSettings(queue=queue, mode="act"),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000),
        goodput=GoodputSettings(profiles=2),
    )
    cluster = Cluster([node(kind, 8, kind) for kind in TYPES])
    for job_id, (own, *others) in enumerate(allowed, start=1):
        profiles = tuple(
            TypeProfile(t, least=1, most=64, single=100.0, estimated=t != own) for t in TYPES
        )
        application = Application(
            name=f"app{job_id}", initial_batch=64, max_batch=64, batch=64, types=profiles
        )
        # Two GPUs are of no use to it.
        seen = tuple(
            Observation(own, 1, g, 64 // g, 9.0 if g > 1 else 0.6, 0.6 / g) for g in (1, 2)
        )
        cluster.add(
            job_id,
            elastic=f"1-8,types={':'.join([own, *others])}",
            on={own: 1},
            record={"learned": Learned(application, seen, Noise(1.0, 1.0))},
        )
    proposals, _ = MarginalValue(config).decide(random_question(cluster, 0), {})
    first = {p.job_id: p.alternatives[0] for p in proposals}
    measured = {j: a.gpu_type for j, a in first.items() if a.reason.code == "measures-type"}
    for job_id, (own, *others) in enumerate(allowed, start=1):
        assert (job_id in measured) == bool(others)
        assert measured.get(job_id, "") in {"", *others} - {own}


class Waits:
    """Waits of elastic jobs under a cluster's limits, and the exceptions from their bound."""

    def __init__(self, cluster, wait_s, round_s):
        self._cluster, self._wait_s, self._round_s = cluster, wait_s, round_s
        self._waited = dict.fromkeys(cluster.records, 0.0)
        self._ran = dict.fromkeys(cluster.records, 0.0)
        self.exceptions = 0

    def _entitled(self, now):
        """Return the least that jobs come before others with: (id, size, types) of each."""
        entitled = []
        for job in self._cluster.jobs:
            if job.job_id not in self._waited:
                continue
            if job.allocation is None and self._waited[job.job_id] >= self._wait_s:
                entitled.append((job.job_id, job.directive.min_gpus, set(BOTH)))
            if job.allocation is not None and now - job.start_time < self._wait_s:
                least = min(job.directive.min_gpus, job.allocation.gpus)
                entitled.append((job.job_id, least, {job.allocation.gpu_type}))
        return entitled

    def excepted(self, now):
        """Return the jobs for which those that come before them leave too little, or scattered."""
        rigid = [j.allocation for j in self._cluster.jobs if not j.directive and j.allocation]
        entitled, excepted = self._entitled(now), set()
        for job_id, least, _ in entitled:
            if self._waited[job_id] < self._wait_s:
                continue
            others = [e for e in entitled if e[0] != job_id]
            possible = False
            for kind in BOTH:
                left = sum(n.gpus for n in self._cluster.nodes if n.gpu_type == kind)
                left -= sum(a.gpus for a in rigid if a.gpu_type == kind)
                rooms = [left - sum(size for _, size, kinds in others if kind in kinds)]
                rooms += [
                    self._left(limit, others, kind)
                    for limit in self._cluster.limits
                    if job_id in limit.jobs and limit.resource in ("gpu", f"gpu:{kind}")
                ]
                possible |= min(rooms) >= least
            if not possible:
                excepted.add(job_id)
        return excepted | {j.job_id for j in self._cluster.jobs if j.elastic and self._scattered(j)}

    @staticmethod
    def _left(limit, others, kind):
        """Return what the smallest sizes of others leave of a limit."""
        counted = (
            size
            for i, size, kinds in others
            if i in limit.jobs and (limit.resource == "gpu" or kind in kinds)
        )
        return limit.cap - sum(counted)

    def _scattered(self, job):
        """Return whether enough GPUs are free for a job, on nodes of which each has too few."""
        least = job.directive.min_gpus
        nodes = self._cluster.snapshot().nodes
        for kind in BOTH:
            free = [n.free_gpus for n in nodes if n.gpu_type == kind]
            splits = best_fit.even_splits(least, max((n.gpus for n in nodes), default=1))
            fits = any(sum(f >= share for f in free) >= count for count, share in splits)
            if sum(free) >= least and not fits:
                return True
        return False

    def check(self, excepted, plan):
        """Count a round that was carried out, and check the bound."""
        # Jobs that are to leave GPUs for others that are not free yet leave in a later round.
        blocked = any(
            d.current
            and d.action is Action.KEEP
            and d.reason.code in ("assigned-not-free", "keeps-for-now")
            for d in plan.decisions
        )
        for job in self._cluster.jobs:
            key = job.job_id
            if key not in self._waited:
                continue
            self._ran[key] = self._ran[key] + self._round_s if job.allocation else 0.0
            if self._ran[key] >= self._wait_s:
                self._waited[key] = 0.0
            if not job.allocation:
                late = self._waited[key] >= self._wait_s
                self._waited[key] += self._round_s
                if late and (blocked or key in excepted or self._scattered(job)):
                    self._waited[key] = self._wait_s
                    self.exceptions += 1
            assert self._waited[key] <= self._wait_s + 2 * self._round_s


BOTH = ("a100", "t4")


def crowded(rng, nodes):
    """Draw nodes of one or two types, rigid jobs, and elastic ones that wait for all the rest."""
    members = [
        node(f"n{i}", rng.choice([4, 8]), rng.choice(BOTH) if nodes > 1 else "a100")
        for i in range(nodes)
    ]
    cluster = Cluster(members)
    job_id, left = 0, 0
    for member in members:
        taken = rng.choice([0, 0, 1, 2])
        left += member.gpus - taken
        if taken:
            job_id += 1
            cluster.add(job_id, on={member.name: taken})
    # Beyond what all smallest sizes take, some jobs have to wait.
    left = int(left * rng.choice([0.8, 1.0, 1.0, 1.2]))
    while left > 0:
        job_id += 1
        least = min(left, rng.choice([1, 1, 2, 4]))
        left -= least
        cluster.add(
            job_id,
            elastic=f"{least}-{least * 8}",
            gpus=least,
            record={"learned": scaling(rng)},
            submit_time=cluster.time,
        )
    for resource in rng.choice([[], ["gpu"], ["gpu:a100"], ["gpu", "gpu"]]):
        jobs = frozenset(j for j in cluster.records if rng.random() < 0.6)
        cap = rng.randint(2, 8)
        cluster.limits += (Limit(name=resource, resource=resource, cap=cap, jobs=jobs),)
    return cluster


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_over_many_rounds_no_job_waits_longer_than_the_bound(nodes, seed):
    rng = random.Random(seed)
    wait_s, round_s = 300.0, 60.0
    drawn = goodput_config(rng)
    usual = GoodputSettings()
    p, charge = rng.choice([(usual.p, usual.charge), (1.0, 0.0)])
    config = dataclasses.replace(
        drawn,
        controller=ControllerSettings(queue="controller", mode="act"),
        goodput=dataclasses.replace(drawn.goodput, wait_s=wait_s, p=p, charge=charge),
    )
    cluster = crowded(rng, nodes)
    policy, state = MarginalValue(config), {}
    waits = Waits(cluster, wait_s, round_s)
    for turn in range(24):
        for key, record in cluster.records.items():
            if rng.random() < 0.1:
                cluster.records[key] = dataclasses.replace(record, learned=scaling(rng))
        before = cluster.snapshot()
        excepted = waits.excepted(cluster.time)
        plan, state = decide_round(
            before, cluster.records, config=config, policy=policy, state=state, seed=turn
        )
        cluster.carry_out(plan)
        check_limits(before, cluster.snapshot())
        state = json.loads(json.dumps(state))
        waits.check(excepted, plan)
        cluster.time += round_s


@settings(max_examples=60)
@given(*CASES)
def test_whole_rounds_of_sia_keep_capacity_and_classes(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    policy, state = Sia(config), {}
    for _ in range(2):
        snapshot = cluster.snapshot()
        plan, state = decide_round(
            snapshot, cluster.records, config=config, policy=policy, state=state, seed=seed
        )
        check_capacity(plan, snapshot)
        for decision in plan.decisions:
            target = decision.target
            if target is not None:
                directive = snapshot.job[decision.job_id].directive
                assert directive.allows(target.gpus, target.gpu_type) or target == decision.current
        cluster.carry_out(plan)
        cluster.time += 60
        state = json.loads(json.dumps(state))


@settings(max_examples=60)
@given(*CASES)
def test_whole_rounds_of_goodput_keep_capacity(nodes, jobs, seed):
    rng = random.Random(seed)
    config = goodput_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    with_progress(rng, cluster)
    with_types_and_limits(rng, cluster)
    policy, state = MarginalValue(config), {}
    for _ in range(2):
        snapshot = cluster.snapshot()
        plan, state = decide_round(
            snapshot, cluster.records, config=config, policy=policy, state=state, seed=seed
        )
        check_capacity(plan, snapshot)
        for decision in plan.decisions:
            target, directive = decision.target, snapshot.job[decision.job_id].directive
            if target and target != decision.current:
                assert directive.allows(target.gpus, target.gpu_type)
        cluster.carry_out(plan)
        check_limits(snapshot, cluster.snapshot())
        cluster.time += 60.0
