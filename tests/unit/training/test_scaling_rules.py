"""A batch that changes while a job trains: limits, learning rate, schedule, and exact gradients."""

import doctest
import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slurm_elastic.core.application import Noise
from slurm_elastic.core.directive import Directive
from slurm_elastic.models import efficiency
from slurm_elastic.training import scaling_rules
from slurm_elastic.training.sampler import Cursor, EvenSplit, Sampler, StepShare
from slurm_elastic.training.scaling_rules import RULES, WARM_UP, BatchSize, limits

NOISE = {"grad_sqr": 2.0, "grad_var": 6.0}


class Steps:
    """Counts the steps of a schedule."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1


def size(initial: int = 8, low: int = 1, high: int = 1000, **options) -> BatchSize:
    return BatchSize(initial, limits=(low, high), **options)


def test_examples() -> None:
    assert doctest.testmod(scaling_rules).failed == 0


# --- what may be ordered ---


def test_only_the_directive_lets_the_batch_change() -> None:
    assert limits(64, None) == (64, 64)
    assert limits(64, Directive.parse("1-8")) == (64, 64)
    assert limits(64, Directive.parse("1-8,batch=32-512")) == (32, 512)
    assert limits(64, Directive.parse("1-8,batch=512")) == (512, 512)


def test_the_limits_are_those_of_the_directive_in_force() -> None:
    lead = size(8, 8, 8)
    lead.set_order(64)
    assert lead.requested == 8
    lead.set_order(64, "1-8,batch=8-32")
    assert lead.requested == 32
    lead.set_order(None, "1-8,batch=16")
    assert lead.requested == 16
    lead.set_order(64, "some day, something else")
    assert lead.requested == 8
    lead.apply(16)
    lead.set_order(None, "1-4")
    assert lead.requested == 8


@given(
    st.integers(1, 300),
    st.tuples(st.integers(1, 300), st.integers(1, 300)).map(sorted),
    st.integers(1, 64),
    st.none() | st.integers(1, 2**31),
)
def test_an_ordered_batch_is_applied_within_the_limits(initial, between, replicas, ordered) -> None:
    low, high = between
    lead = size(initial, low, high, replicas=replicas)
    other = size(initial, low, high, replicas=replicas, is_leader=False)
    assert lead.now == other.now == min(max(initial, low), high)
    before = lead.now
    lead.ordered = other.ordered = ordered
    wish = lead.requested + other.requested
    assert lead.apply(wish) == other.apply(wish) == (wish != before)
    assert lead.now == other.now == wish
    assert low <= wish <= high
    if ordered is None:
        assert wish == before
    elif low <= ordered <= high and ordered >= replicas:
        assert wish == ordered
    elif high >= replicas:
        assert wish >= replicas


def test_a_batch_beyond_float32_integers_is_not_requested() -> None:
    lead = size(8, 8, 10**9)
    lead.ordered = 2**24 + 1
    assert lead.requested == 8
    lead.ordered = 2**24
    assert (
        lead.requested
        == 2**24
        == int(torch.tensor(float(lead.requested), dtype=torch.float32).item())
    )


def test_a_batch_that_differs_from_the_script_is_logged_in_one_line() -> None:
    log_lines: list[str] = []
    for options in (
        {"initial": 8, "limits": (8, 8)},
        {"initial": 8, "limits": (4, 64)},
        {"initial": 8, "limits": (32, 32)},
        {"initial": 8, "limits": (16, 64), "rule": "linear"},
        {"initial": 8, "limits": (2, 4), "rule": "adascale"},
        {"initial": 3, "limits": (3, 3), "replicas": 4},
    ):
        BatchSize(**options, log=log_lines.append).log_initial()
        BatchSize(**options, is_leader=False, log=log_lines.append).log_initial()
    outside = "global_batch is 8, outside the directive's batch="
    rate = "; the learning rate is multiplied by 2"
    assert log_lines == [
        f"global_batch is 8, the directive says batch=32: a step takes 32 samples{rate} (sqrt)",
        f"{outside}16-64: a step takes 16 samples{rate} (linear)",
        f"{outside}2-4: a step takes 4 samples; the learning rate follows its gain (adascale)",
        "a step takes 3 samples, 1 of 4 replicas have none: raise the batch or request fewer GPUs",
    ]
    log_lines.clear()
    lead = size(8, 8, 64, log=log_lines.append, rule="constant")
    assert lead.apply(64.0)
    assert log_lines == ["a step takes 64 samples instead of 8"]
    assert not lead.apply(64.0)
    assert not lead.apply(0.0)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'sgrt' is invalid: expected one of sqrt, adascale"):
        size(rule="sgrt")
    with pytest.raises(ValueError, match="global_batch: 0 is invalid: expected at least 1"):
        size(0)


def test_reports_contain_the_micro_batches_of_a_replica() -> None:
    lead = size(100, 1, 1000, replicas=3)
    facts = {"global_batch": 100, "initial_batch": 100, "micro_batch": 34, "accumulation": 0}
    assert lead.report_fields(None) == facts
    lead.apply(200)
    assert lead.report_fields(16) == facts | {
        "global_batch": 200,
        "micro_batch": 14,
        "accumulation": 4,
    }


# --- the learning rate ---


@pytest.mark.parametrize("rule", RULES)
@given(batch=st.integers(1, 4000), sqr=st.floats(1e-6, 1e6), var=st.floats(1e-6, 1e6))
def test_each_rule_follows_its_formula(rule, batch, sqr, var) -> None:
    lead = size(50, 1, 4000, rule=rule, noise=lambda: {"grad_sqr": sqr, "grad_var": var})
    lead.apply(batch)
    for _ in range(WARM_UP):
        lead.advance(None, batch, last=False, gain=1.0)
    k, gain = batch / 50, lead.gain(batch)
    published = float(efficiency.gain(batch, initial_batch=50, noise=Noise(sqr, var)))
    expected = {"constant": 1.0, "sqrt": math.sqrt(k), "linear": k, "adascale": published}
    assert lead.factor(batch, gain=gain) == pytest.approx(expected[rule])
    assert min(1, k) * (1 - 1e-9) <= lead.factor(batch, gain=gain) <= max(1, k) * (1 + 1e-9)
    assert gain == (0.0 if rule != "adascale" else pytest.approx(expected["adascale"]))


@pytest.mark.parametrize("rule", RULES)
def test_the_factor_at_the_initial_batch_is_exactly_one(rule) -> None:
    lead, scheduler = size(12, 4, 99, rule=rule, noise=lambda: NOISE), Steps()
    for count in (12, 12, 5, 12, 1):  # 5 and 1: the ends of epochs
        gain = lead.gain(count)
        assert lead.factor(count, gain=gain) == 1
        assert lead.advance(scheduler, count, last=count < 12, gain=gain) == 1


def test_a_small_last_batch_of_an_epoch_gets_a_small_rate() -> None:
    lead = size(8)
    lead.apply(128)
    assert [lead.factor(n) for n in (128, 32, 8, 1)] == [4.0, 2.0, 1.0, 1.0]
    lead.apply(2)
    assert lead.factor(1) == lead.factor(2) == 0.5


def test_linear_warms_up_after_a_rise_only() -> None:
    lead = size(10, rule="linear")

    def factors(count: int, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            found.append(lead.factor(count))
            lead.advance(None, count, last=False)
        return found

    assert factors(10, 3) == [1.0] * 3
    lead.apply(50)
    rise = factors(50, WARM_UP + 2)
    assert rise[0] == 1.0
    assert rise[WARM_UP // 2] == pytest.approx(3.0)
    assert rise[WARM_UP:] == [5.0, 5.0]
    assert all(0 < b - a < 0.1 for a, b in pairwise(rise[:-1]))
    lead.apply(20)
    assert factors(20, 2) == [2.0, 2.0]
    lead.apply(50)
    half = factors(50, WARM_UP // 2)
    lead.apply(60)
    assert factors(60, 1)[0] == pytest.approx(half[-1], rel=0.02)
    assert size(10, 50, 50, rule="linear").factor(50) == 1.0  # from the beginning, too


def test_adascale_keeps_the_last_noise() -> None:
    noise: dict[str, float] = {}
    lead = size(8, rule="adascale", noise=lambda: noise)
    lead.apply(32)
    assert lead.gain(32) == 1.0
    noise.update(NOISE)
    assert lead.gain(32) == pytest.approx(8 / 3.5)
    noise.clear()
    again = size(8, rule="adascale", noise=lambda: noise)
    again.load_state_dict(lead.state_dict())
    assert again.gain(32) == pytest.approx(8 / 3.5)
    assert size(8, rule="adascale", noise=lambda: NOISE, is_leader=False).gain(32) == 0.0


def test_rates_are_scaled_during_the_update_only() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    capturable = torch.tensor(0.5)
    optimizer = torch.optim.SGD([{"params": [parameter], "lr": 0.1}])
    lead = size(8)
    lead.apply(32)
    with lead.scaled(optimizer, 32):
        assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.raises(RuntimeError, match="oh"), lead.scaled(optimizer, 32):
        raise RuntimeError("oh")
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = capturable
    with lead.scaled(optimizer, 32):
        assert float(optimizer.param_groups[0]["lr"]) == 1.0
    assert optimizer.param_groups[0]["lr"] is capturable
    assert float(capturable) == 0.5


# --- the schedule ---


@given(
    st.integers(1, 200),
    st.integers(1, 20),
    st.lists(st.integers(1, 90), min_size=1, max_size=12),
    st.sampled_from(["sqrt", "linear", "constant"]),
)
def test_the_schedule_at_the_end_of_an_epoch_does_not_depend_on_the_batch(
    samples, initial, batches, rule
) -> None:
    lead, scheduler = size(initial, rule=rule), Steps()
    epoch_steps = -(-samples // initial)
    step = 0
    for epoch in range(1, 4):
        left = samples
        while left:
            lead.apply(batches[step % len(batches)])
            count = min(lead.now, left)
            left -= count
            lead.advance(scheduler, count, last=not left)
            step += 1
            consumed = samples - left
            if left:
                assert scheduler.count == (epoch - 1) * epoch_steps + consumed // initial
        assert scheduler.count == epoch * epoch_steps


def test_adascale_advances_the_schedule_by_its_gain() -> None:
    lead, scheduler = size(8, rule="adascale", noise=lambda: NOISE), Steps()
    lead.apply(32)
    times = [lead.advance(scheduler, 32, last=False, gain=lead.gain(32)) for _ in range(6)]
    assert times == [2, 2, 2, 3, 2, 2]  # 6 times 16/7
    assert sum(times) == scheduler.count


# --- through a checkpoint ---


@pytest.mark.parametrize("rule", RULES)
@given(st.lists(st.integers(1, 90), min_size=2, max_size=9), st.integers(0, 8))
def test_a_resumed_batch_state_equals_an_uninterrupted_one(rule, batches, cut) -> None:
    def steps(lead: BatchSize, batches: list[int]) -> Iterator[tuple[float, int]]:
        for batch in batches:
            lead.apply(batch)
            gain = lead.gain(batch)
            yield lead.factor(batch, gain=gain), lead.advance(None, batch, last=False, gain=gain)

    whole = list(steps(size(7, rule=rule, noise=lambda: NOISE), batches))
    first = size(7, rule=rule, noise=lambda: NOISE)
    begun = list(steps(first, batches[:cut]))
    second = size(7, rule=rule)
    second.load_state_dict(first.state_dict())
    if rule == "adascale" and not begun:
        second = size(7, rule=rule, noise=lambda: NOISE)
    assert second.now == first.now
    assert begun + list(steps(second, batches[cut:])) == whole


def test_a_resume_adapts_to_other_limits_rules_and_batches() -> None:
    log_lines: list[str] = []
    before = size(8)
    before.apply(64)
    before.advance(None, 60, last=False)
    kept = before.state_dict()
    narrower = size(8, 8, 16, log=log_lines.append)
    narrower.load_state_dict(kept)
    assert narrower.now == 16
    other = size(12, 12, 99, log=log_lines.append)
    other.load_state_dict(kept)
    assert other.now == 12
    assert other.advance(None, 12, last=False) == 1
    another_rule = size(8, rule="adascale", log=log_lines.append)
    another_rule.load_state_dict(kept)
    assert another_rule.now == 64
    assert another_rule.advance(None, 64, last=False, gain=1.5) == 1
    for empty in (None, {}):
        size(log=log_lines.append).load_state_dict(empty)
    assert log_lines == [
        "a step took 64 samples, the directive now allows 16",
        "global_batch was 8, from now on it is 12",
    ]


# --- against a plain loop ---

SAMPLES, INITIAL = 50, 6
#: Batches of the steps of two epochs, and into how many ranks each step is split.
BATCHES = (6, 6, 17, 17, 17, 3, 3, 24, 24, 24, 6, 6)
WORLDS = (1, 3, 2, 4, 5)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return points, (points.sum(dim=1, keepdim=True) > 0).double()


def parts(optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, object]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    made: torch.optim.Optimizer
    if optimizer == "sgd":
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    else:
        made = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 18)


def trained(optimizer: str, rule: str) -> list[torch.Tensor]:
    """Losses, gradients and parameters, by the library's parts and uneven shares of ranks."""
    points, labels = data()
    model, made, scheduler = parts(optimizer)
    lead = size(INITIAL, rule=rule, noise=lambda: NOISE)
    cursor, found = Cursor(), []
    for i, batch in enumerate(BATCHES):
        lead.apply(batch)
        plan = Sampler(samples=SAMPLES, global_batch=lead.now, epochs=2, seed=4)
        if plan.ended(cursor):
            break
        world = WORLDS[i % len(WORLDS)]
        splits = [EvenSplit(rank=rank, world_size=world, micro=4) for rank in range(world)]
        shares: list[StepShare] = [next(plan.shares(cursor, split)) for split in splits]
        made.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for share in shares:
            for at in share.samples:
                summed = nn.functional.mse_loss(model(points[at]), labels[at]) * len(at)
                summed.backward()
                loss += summed.detach()
        for parameter in model.parameters():
            parameter.grad /= shares[0].count
        found += [loss / shares[0].count, *[p.grad.clone() for p in model.parameters()]]
        count, after = shares[0].count, shares[0].after
        gain = lead.gain(count)
        with lead.scaled(made, count, gain=gain):
            made.step()
        lead.advance(scheduler, count, last=after.epoch != cursor.epoch, gain=gain)
        cursor = after
    assert cursor.epoch == 2
    return found + list(model.parameters())


def plain(optimizer: str, rule: str) -> list[torch.Tensor]:
    """Train by hand: whole batches, and a learning rate that is set before every step."""
    points, labels = data()
    model, made, _ = parts(optimizer)
    base = made.param_groups[0]["lr"]
    found, position, epoch, taken = [], 0.0, 0, 0
    for batch in BATCHES:
        if epoch == 2:
            break
        order = Sampler(samples=SAMPLES, global_batch=1, epochs=2, seed=4).order(epoch)
        at = order[taken : taken + batch]
        k = max(len(at), min(batch, INITIAL)) / INITIAL
        gain = (2.0 + 6.0) / (6.0 / k + 2.0)
        factor = {"constant": 1.0, "sqrt": k**0.5, "adascale": gain}[rule]
        rate = base * (1 + math.cos(math.pi * int(position + 1e-9) / 18)) / 2
        made.param_groups[0]["lr"] = rate * factor
        made.zero_grad()
        loss = nn.functional.mse_loss(model(points[at]), labels[at])
        loss.backward()
        found += [loss.detach(), *[p.grad.clone() for p in model.parameters()]]
        made.step()
        taken += len(at)
        position += gain if rule == "adascale" else len(at) / INITIAL
        if taken == SAMPLES:
            epoch, taken = epoch + 1, 0
            position = position if rule == "adascale" else math.ceil(position - 1e-9)
    return found + list(model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("rule", ["sqrt", "adascale", "constant"])
def test_losses_and_gradients_equal_those_of_a_plain_loop(rule, optimizer) -> None:
    ours, expected = trained(optimizer, rule), plain(optimizer, rule)
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
