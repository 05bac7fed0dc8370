"""Partitioner against a search through all plans, written from the formulas alone."""

import itertools
import math
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.layers import Layer, LayerProfile
from slurm_elastic.models.pipedream.partitioner import Cost, Level, PipelineError, partition

NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 7.0])


@st.composite
def profiles(draw, most=6):
    count = draw(st.integers(1, most))
    layers = tuple(
        Layer(f"n{i}", *(draw(NUMBERS) for _ in range(4)))
        for i in draw(st.permutations(range(count)))
    )
    edges = set()
    for i in range(1, count):
        edges |= {(f"n{j}", f"n{i}") for j in draw(st.sets(st.integers(0, i - 1), min_size=1))}
    return LayerProfile(layers, tuple(sorted(edges)))


@st.composite
def questions(draw):
    levels = [
        Level(draw(st.integers(1, 4)), draw(st.sampled_from([0.5, 1.0, 4.0, 50.0])))
        for _ in range(draw(st.integers(1, 2)))
    ]
    return levels, {
        "cost": draw(st.sampled_from(Cost)),
        "compression": draw(st.sampled_from([None, 1.0, 1.0, 2.0])),
        "memory": draw(st.sampled_from([None, None, 5.0, 20.0, 60.0])),
        "straight": draw(st.booleans()),
    }


class Plain:
    """Costs as sums over sets of names, without shortcuts."""

    def __init__(self, profile, levels, *, cost, compression, memory, straight):
        self.layers = {layer.name: layer for layer in profile.layers}
        self.edges = profile.edges
        self.levels, self.memory, self.straight = levels, memory, straight
        self.paper, self.compression = cost is Cost.PAPER, compression
        names = list(self.layers)
        self.whole = frozenset(names)
        self.sets = [
            frozenset(chosen)
            for n in range(len(names) + 1)
            for chosen in itertools.combinations(names, n)
            if all(a in chosen for a, b in self.edges if b in chosen)
        ]
        self.search = lru_cache(maxsize=None)(self._search)

    def total(self, names, field):
        return math.fsum(getattr(self.layers[n], field) for n in names)

    def output(self, names):
        read = {a for a, _ in self.edges}
        leaves = {a for a, b in self.edges if a in names and b not in names}
        return self.total(leaves | (set(names) - read), "activation_bytes")

    def value(self, level, waiting, a, b):
        if level >= 0:
            return self.search(level, waiting, a, b, self.levels[level].machines)
        kept = self.total(b - a, "activation_bytes") + self.total(b - a, "parameter_bytes")
        if self.memory is not None and (waiting + 1) * kept > self.memory * (1 + 1e-9):
            return math.inf
        return self.total(b - a, "compute_s")

    def stage(self, level, waiting, a, b, m, r, *, alone):
        machines, bandwidth = self.levels[level].machines, self.levels[level].bandwidth
        if self.straight and r > 1:
            return math.inf
        behind = math.ceil((waiting * machines + machines - m) / r)
        value = self.value(level - 1, behind, a, b)
        weights = self.total(b - a, "parameter_bytes")
        if self.paper:
            return max(value, 2 * (r - 1) * weights / bandwidth) / r
        shared = self.levels[level - 1].machines if alone and level else 1
        return (value + 4 * (r - 1) * weights / (bandwidth * r) / shared) / r

    def crossing(self, level, k, b, r):
        bandwidth = self.levels[level].bandwidth
        if self.paper:
            return 2 * self.output(k) / (bandwidth * (self.compression or 1.0))
        if self.compression is None:
            return 0.0
        out = self.output(b) if b != self.whole else 0.0
        return 2 * max(self.output(k), out) / (bandwidth * r * self.compression)

    def _search(self, level, waiting, a, b, m):
        best = self.stage(level, waiting, a, b, m, m, alone=True)
        for k in self.sets:
            if a < k < b:
                for r in range(1, m):
                    last = self.stage(level, waiting, k, b, m, r, alone=False)
                    if last < best:
                        before = self.search(level, waiting, a, k, m - r)
                        best = min(best, max(before, last, self.crossing(level, k, b, r)))
        return best

    def best(self):
        return self.value(len(self.levels) - 1, 0, frozenset(), self.whole)


@settings(max_examples=300)
@given(profiles(), questions())
def test_as_good_as_all_plans(profile, question):
    levels, options = question
    goal = Plain(profile, levels, **options).best()
    if math.isinf(goal):
        with pytest.raises(PipelineError, match="no "):
            partition(profile, levels, **options, free_sources=True)
        return
    found = partition(profile, levels, **options, free_sources=True)
    assert found.exact
    assert found.pipeline_time_s == pytest.approx(goal, rel=1e-9, abs=1e-12)
    check_plan(found, profile, levels, options)


@settings(max_examples=60)
@given(profiles(most=9), questions(), st.integers(1, 20))
def test_with_fewer_cuts_still_a_plan(profile, question, limit):
    levels, options = question
    try:
        found = partition(profile, levels, **options, limit=limit)
    except PipelineError:
        return
    check_plan(found, profile, levels, options)
    assert found.bound_s <= found.pipeline_time_s
    if found.exact:
        assert found.states <= limit


def check_plan(found, profile, levels, options):
    """Check a plan: each layer once, after its inputs; all machines; memory; time as stated."""
    order = [name for stage in found.stages for name in stage.layers]
    assert sorted(order) == sorted(layer.name for layer in profile.layers)
    assert all(order.index(a) < order.index(b) for a, b in profile.edges)
    gpus = math.prod(level.machines for level in levels)
    assert sum(stage.replicas for stage in found.stages) == gpus
    left = gpus
    for stage in found.stages:
        assert stage.replicas == math.prod(stage.replicas_by_level)
        # Nested rounding up is never below a flat count.
        assert stage.in_flight >= math.ceil(left / stage.replicas)
        left -= stage.replicas
        if options["memory"] is not None:
            assert stage.memory_bytes <= options["memory"] * (1 + 1e-9)
        if options["straight"]:
            assert stage.replicas == 1
    if len(levels) == 1:
        plain = Plain(profile, levels, **options)
        done, m, times = frozenset(), 0, []
        for i, stage in enumerate(found.stages):
            now, m = done | frozenset(stage.layers), m + stage.replicas
            times.append(plain.stage(0, 0, done, now, m, stage.replicas, alone=i == 0))
            if i:
                times.append(plain.crossing(0, done, now, stage.replicas))
            done = now
        assert max(times) == pytest.approx(found.pipeline_time_s, rel=1e-9, abs=1e-12)


@given(profiles())
def test_same_answer_every_time_and_one_gpu_is_one_stage(profile):
    levels = [Level(3, 2.0)]
    assert partition(profile, levels) == partition(profile, levels)
    alone = partition(profile, [Level(1, 1.0)])
    assert len(alone.stages) == 1
    assert alone.pipeline_time_s == pytest.approx(profile.compute_s, abs=1e-12)
