"""What running jobs are told without a restart: the batch of best goodput, and frozen layers."""

import dataclasses
import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.cli.decisions import explain
from slurm_elastic.config import schema
from slurm_elastic.controller.batch_tuning import (
    MIN_GAIN,
    BatchChoice,
    choose,
    frozen,
    restrict_to_order,
)
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import Viewer
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.order_outbox import DesiredSettings
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.cluster import Allocation, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders
from slurm_elastic.models.frozen_penalty import choose as choose_frozen
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.policies import policy_protocol
from tests.support.controller.batch_tuning import NODES, PER_NODE, TuningController, report, running
from tests.support.controller.job_records import FakeScontrol, Log, job
from tests.support.decisions import example_round as example
from tests.support.decisions.reasons import words

ONE = Allocation.of("a100", {"n1": 1})
FOUR = Allocation.of("a100", {"n1": 4})


def application(low=64, high=1024, most=256, **fields):
    types = tuple(TypeProfile(t, least=1, most=most) for t in PER_NODE)
    values = {"name": "net", "initial_batch": low, "max_batch": high, "batch": low, "types": types}
    return Application(**(values | fields))


def seen(gpus=1, micro_batch=64, gpu_type="a100"):
    """Half of a step's computing does not depend on the batch."""
    micro_s = 0.1 + 0.1 * micro_batch / 64
    return Observation(gpu_type, 1, gpus, micro_batch, micro_s + 0.1 * (gpus > 1), micro_s)


NOISY = Noise(1.0, 100.0)


def learned(*observations, noise=NOISY, **fields):
    return Learned(application(**fields), observations or (seen(),), noise)


def chosen(known, held=ONE, present=64, limits=(64, 1024)):
    return choose(known, held, present, limits=limits, per_node=PER_NODE)


def settled(known, held=ONE, present=64, limits=(64, 1024)):
    """What becomes of a batch in rounds without other news, and how it got there."""
    way = [present]
    while (found := chosen(known, held, way[-1], limits)).batch != way[-1]:
        way.append(found.batch)
        assert len(way) < 40, way
    return way


# --- the choice ---


def test_a_noisy_gradient_gets_a_large_batch_and_a_clear_one_a_small_batch():
    large = chosen(learned())
    assert large.batch == 128
    assert large.gain >= MIN_GAIN
    assert words(large.reason) == f"goodput {large.gain:+.0%} over that of 64"
    clear = learned(noise=Noise(100.0, 1.0))
    assert settled(clear) == [64]
    assert settled(clear, present=512) == [512, 64]


def test_a_batch_at_most_doubles_at_a_time():
    way = settled(learned(seen(4, 64), most=64), FOUR, limits=(64, 4000))
    assert way[:3] == [64, 128, 256]
    assert all(b <= 2 * a for a, b in pairwise(way))
    assert way[-1] > 500


def test_micro_batches_at_most_double_what_was_measured():
    known = learned(seen(micro_batch=64), accumulation=False)
    assert settled(known)[-1] == 128
    known = learned(seen(micro_batch=64), seen(micro_batch=128), accumulation=False)
    assert 240 <= settled(known)[-1] <= 256
    assert settled(known, FOUR, limits=(64, 600))[-1] in range(500, 601, 4)


def test_a_pipeline_gets_batches_of_whole_micro_batches():
    """Eight micro-batches are in each pass: batches are multiples of eight for each replica."""
    types = tuple(TypeProfile(t, least=1, most=64, unit=2) for t in PER_NODE)
    known = learned(
        Observation("a100", 1, 4, 4, 0.9, 0.8), micro_batches=8, types=types, accumulation=False
    )
    choice = chosen(known, FOUR)
    assert choice.batch == 128
    ordered = restrict_to_order(known, FOUR, 64, batch=1000, limits=(64, 1024))
    assert ordered.batch == 128, "twice the share that was measured"


def test_without_a_gain_nothing_changes_and_it_says_so():
    known = learned(seen(micro_batch=64), noise=Noise(1.0, 3.0), high=72)
    found = chosen(known, limits=(64, 72))
    assert found.batch == found.present == 64
    assert words(found.reason) == "72 would gain 2.7%, a change must gain 5%"


def test_what_is_not_known_changes_nothing():
    assert chosen(None) == BatchChoice(64, 64, (64, 1024))
    strong = learned(job_class=JobClass.STRONG_SCALING)
    assert chosen(strong) == BatchChoice(64, 64, (64, 1024))
    assert chosen(Learned(application(), (), Noise(1.0, 9.0))).batch == 64
    silent = chosen(learned(noise=None))
    assert (silent.batch, words(silent.reason)) == (64, "its gradient noise is not known yet")
    assert chosen(learned(types=())).batch == 64


def test_a_batch_outside_the_limits_goes_inside():
    assert chosen(None, present=32) == BatchChoice(
        64, 32, (64, 1024), 0.0, Reason("batch-limits", least=64, most=1024)
    )
    assert chosen(None, present=2000).batch == 1024
    fixed = chosen(None, limits=(96, 96))
    assert (fixed.batch, words(fixed.reason)) == (96, "the directive allows 96")


def test_what_does_not_fit_into_memory_shrinks():
    """It ran on four GPUs with 512, and now has one, which takes 128 at once."""
    known = learned(seen(4, 128), accumulation=False, most=128)
    found = chosen(known, present=512)
    assert found.batch <= 128
    assert "memory" in words(found.reason)


observations = st.builds(
    seen,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([8, 16, 64, 200]),
    st.sampled_from(sorted(PER_NODE)),
)
cases = st.fixed_dictionaries(
    {
        "present": st.integers(1, 3000),
        "limits": st.tuples(st.integers(1, 2000), st.integers(1, 2000)).map(sorted).map(tuple),
        "begun": st.integers(1, 2000),
        "most": st.integers(1, 300),
        "held": st.sampled_from([ONE, FOUR, Allocation.of("v100", {"n3": 3})]),
        "observations": st.lists(observations, max_size=3, unique_by=lambda o: o.micro_batch),
        "noise": st.none() | st.builds(Noise, st.floats(0, 1e6), st.floats(0, 1e6)),
        "accumulation": st.booleans(),
    }
)


@given(cases)
def test_whatever_is_known_the_batch_is_allowed_and_stays_once_it_is_there(case):
    low, high = case["limits"]
    first = max(low, case["begun"])
    known = None
    if first < high:
        known = Learned(
            application(first, high, case["most"], accumulation=case["accumulation"]),
            tuple(case["observations"]),
            case["noise"],
        )
    found = chosen(known, case["held"], case["present"], case["limits"])
    assert low <= found.batch <= high
    assert found == chosen(known, case["held"], case["present"], case["limits"])
    inside = low <= case["present"] <= high
    if found.batch == found.present:
        assert inside
    elif inside:
        assert found.gain >= MIN_GAIN or "memory" in words(found.reason)
    way = settled(known, case["held"], case["present"], case["limits"])
    assert all(low <= batch <= high for batch in way[1:])
    first_inside = max(low, min(case["present"], high))
    assert all(b <= 2 * max(a, first) for a, b in pairwise([first_inside, *way[1:]]))
    if found.gain:
        assert found.batch % case["held"].gpus == 0


# --- which jobs ---


def test_only_a_batch_that_may_change_under_a_policy_that_knows_batches_is_adaptive():
    for tunes, directive, expected in (
        (True, "1-8,batch=64-1024", JobClass.ADAPTIVE),
        (True, "8,batch=64-1024", JobClass.ADAPTIVE),
        (False, "1-8,batch=64-1024", JobClass.STRONG_SCALING),
        (True, "1-8,batch=64", JobClass.STRONG_SCALING),
        (True, "1-8", JobClass.STRONG_SCALING),
        (True, "1-8,batch=16-32", JobClass.STRONG_SCALING),  # smaller than the script's own
        (False, "8,batch=64-1024", JobClass.RIGID),
    ):
        controller, of = TuningController(tunes=tunes), running(directive=directive)
        controller.hear(of, report())
        assert controller.records(of)[7].learned.application.job_class is expected, (
            tunes,
            directive,
        )


def test_an_adaptive_job_as_models_see_it():
    controller, of = TuningController(), running(directive="2-8,batch=128-1024")
    controller.hear(
        of, report(gpus=1, global_batch=512, micro_batch=256, accumulation=1, initial_batch=64)
    )
    known = controller.records(of)[7].learned
    net = known.application
    assert (net.initial_batch, net.batch, net.max_batch) == (128, 128, 1024)
    # Stated at 64; a batch of 128 has half the variance.
    assert known.noise == Noise(1.0, 50.0)
    # A script that states no micro-batch takes whole shares: what was seen, no accumulation.
    assert not net.accumulation
    assert {t.most for t in net.types} == {256}
    controller.hear(of, report(max_micro_batch=32))
    net = controller.records(of)[7].learned.application
    assert net.accumulation
    assert {t.most for t in net.types} == {32}


def test_the_batch_that_was_chosen_does_not_become_the_next_jobs_own():
    controller, of = TuningController(), running()
    controller.hear(of, report(global_batch=512, initial_batch=64))
    fresh = job(job_id=9, name="net", directive="1-8")
    assert controller.records(fresh)[9].learned.application.batch == 64
    between = job(job_id=10, name="net", directive="1-8,batch=100")
    assert controller.records(between)[10].learned.application.batch == 100


def test_a_running_job_is_told_once_and_then_left_in_peace():
    controller, of = TuningController(), running()
    controller.hear(of, report(max_micro_batch=128))
    ((who, choice),) = controller.round(of)
    assert (who, choice.present) == (of, 64)
    assert choice.batch > 64
    assert controller.batch() == choice.batch
    assert controller.round(of) == []
    controller.hear(of, report(max_micro_batch=128, global_batch=choice.batch))
    assert controller.round(of) == []
    assert controller.batch() == choice.batch
    assert controller.tuner.choices[7].batch == choice.batch


def test_jobs_that_get_no_order_of_a_batch():
    of = running()
    for told, options in (
        (report(kind="script"), {}),
        (report(global_batch=None), {}),
        (report(), {"act": False}),
        (report(), {"leave": {7}}),
    ):
        controller = TuningController()
        controller.hear(of, told)
        assert controller.round(of, **options) == []
        assert controller.batch() is None
    held = TuningController()
    held.hear(of, report())
    held.store.entry(of).held = True
    assert held.round(of) == []
    assert TuningController().round(of) == []  # it has not reported
    fixed, plain = TuningController(), running(directive="1-8")
    fixed.hear(plain, report())
    assert fixed.round(plain) == []
    assert fixed.tuner.choices == {}


def test_what_people_decide_counts():
    """A batch fixed later is ordered; a directive without one leaves the job alone again."""
    controller, of = TuningController(), running()
    controller.hear(of, report())
    controller.store.entry(of).override = "1-8,batch=96"
    ((_, choice),) = controller.round(of)
    assert choice.batch == controller.batch() == 96
    controller.store.entry(of).override = "1-8"
    controller.round(of)
    assert controller.batch() is None


def test_other_gpus_begin_with_their_own_batch():
    controller, of = TuningController(), running()
    controller.hear(of, report(max_micro_batch=64, grad_var=300.0))
    controller.round(of)
    before = controller.batch()
    target = Allocation.of("a100", {"n1": 4, "n2": 4})
    decision = Decision(job_id=7, current=of.allocation, target=target, action=Action.GROW,
                        reason=Reason("waits"))  # fmt: skip
    snapshot = Snapshot(time=1000.0, nodes=NODES, jobs=(of,))
    controller.tuner.ahead([decision], snapshot, controller.records(of), controller.reports)
    assert controller.batch(run=0) == before
    assert controller.batch(run=1) > (before or 64)
    assert controller.batch(run=1) % 8 == 0


def test_frozen_layers_stay_within_what_is_certified_and_what_it_may_cost():
    auto = Directive.parse("1-8,freeze=auto,max-penalty=1%")
    told = {"layers": 8, "certified": 3, "frozen": 1, "penalty": 0.004, "certified_penalty": 0.02}
    assert frozen(report(**told), auto) == 1
    assert frozen(report(**told | {"certified_penalty": 0.01}), auto) == 3
    assert frozen(report(**told | {"penalty": 0.5}), auto) == 0
    assert frozen(report(**told | {"certified": 0}), auto) is None
    assert frozen(report(), auto) is None
    assert frozen(report(**told, kind="script"), auto) is None
    assert frozen(report(**told), Directive.parse("1-8")) is None
    controller, of = TuningController(), running(directive=str(auto))
    controller.tuner.answer_report(of, report(**told), directive=auto)
    assert controller.outbox.orders(7, 0).frozen == 1
    controller.tuner.answer_report(of, report(**told | {"run": 5, "penalty": 0.5}), directive=auto)
    assert controller.outbox.orders(7, 0).frozen == 1


@given(
    st.integers(0, 20),
    st.dictionaries(st.integers(0, 30), st.floats(0, 1), max_size=5),
    st.floats(0, 1),
)
def test_never_more_than_certified_nor_dearer_than_allowed(certified, penalties, most):
    found = choose_frozen(certified, penalties, max_penalty=most)
    assert 0 <= found <= certified
    assert found == 0 or penalties[found] <= most
    assert not [n for n, p in penalties.items() if found < n <= certified and p <= most]


# --- what stands ---

puts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.none() | st.integers(1, 5)), max_size=8
)


@given(puts)
def test_an_attempt_is_told_what_was_last_meant_for_it(told):
    settings, expected = DesiredSettings(), {}
    for seq, (job_id, run, batch) in enumerate(told, start=1):
        before = {r: settings.on(Orders(), job_id, run=r).batch for r in range(5)}
        news = settings.put(job_id, run=run, seq=seq, batch=batch)
        for later in range(run, 5):
            expected[job_id, later] = batch
        after = {r: settings.on(Orders(), job_id, run=r).batch for r in range(5)}
        assert news or before == after
    for (job_id, run), batch in expected.items():
        orders = settings.on(Orders(action="notice", seq=2), job_id, run=run)
        assert (orders.batch, orders.action) == (batch, "notice")
        assert orders.seq >= 2
    settings.forget({0})
    assert settings.on(Orders(), 1, run=9) == Orders()


def test_orders_rise_when_something_else_stands():
    settings = DesiredSettings()
    assert settings.put(7, run=0, seq=5, batch=8)
    assert not settings.put(7, run=0, seq=6, batch=8)
    assert settings.on(Orders(), 7, run=0).seq == 5
    assert settings.put(7, run=0, seq=9, batch=None)
    assert settings.on(Orders(seq=2), 7, run=0) == Orders(seq=9)


# --- in words ---


def explained(choice, mode="act"):
    view = dataclasses.replace(example.PLANNED, batches={4711: choice}, mode=mode)
    found = dispatch.answer(
        "explain", view, Viewer(), {"job_ids": (4711,)}, history=[], segments=[]
    )
    lines = explain.explained(json.loads(json.dumps(found)))
    return [line.removeprefix("  Batch:          ") for line in lines if "Batch:" in line]


def test_explain_says_what_becomes_of_the_batch():
    grows = BatchChoice(
        512, 256, (256, 4096), 0.23, Reason("batch-goodput", gain=0.23, present=256)
    )
    assert explained(grows) == ["256 → 512: goodput +23% over that of 256."]
    assert explained(grows, "advise") == [
        "256 → 512, but mode is advise: goodput +23% over that of 256."
    ]
    stays = BatchChoice(
        256,
        256,
        (256, 4096),
        0.0,
        Reason("batch-gains-little", batch=512, gain=0.031, min_gain=0.05),
    )
    assert explained(stays) == ["256 of 256-4096; 512 would gain 3.1%, a change must gain 5%."]
    assert explained(BatchChoice(96, 96, (96, 96))) == ["96."]


def test_the_model_agrees_that_the_chosen_batch_is_the_better_one():
    """The truth is known here: of all batches none gains more than a change must."""
    known = learned(seen(micro_batch=64), seen(micro_batch=128), seen(4, 128), most=128)
    for held in (ONE, FOUR):
        (*_, found) = settled(known, held)

        def goodput(batch, held=held):
            fixed = dataclasses.replace(
                known.application, job_class=JobClass.STRONG_SCALING, batch=batch
            )
            model = GoodputModel.of(
                dataclasses.replace(known, application=fixed), per_node=PER_NODE
            )
            return float(model.goodputs("a100", 1, held.gpus))

        best = max(goodput(b) for b in range(64, 1025, 8))
        assert goodput(found) == pytest.approx(best, rel=MIN_GAIN)


# --- the whole controller ---


class Reader:
    """What a controller reads, without a slurmctld."""

    down = staticmethod(frozenset)

    def __init__(self, *jobs):
        self._jobs = {j.job_id: j for j in jobs}

    def jobs(self):
        return self._jobs

    def snapshot(self, jobs):
        return Snapshot(time=time.time(), nodes=NODES, jobs=tuple(jobs.values()))

    def settings(self):
        return {"private_data": ""}


@pytest.mark.parametrize("mode", ["observe", "act"])
def test_a_round_tells_the_batch_and_a_report_the_layers(tmp_path, mode):
    of = running(gpus=4, directive="4,batch=64-1024,freeze=auto", submit_time=1.0)
    site = schema.parse(f'[controller]\npolicy = "sia"\nmode = "{mode}"')
    log = Log()
    controller = Controller(
        config=site,
        reader=Reader(of),
        scontrol=FakeScontrol(),
        ledger=Ledger(tmp_path / "ledger.sqlite"),
        policy=policy_protocol.load(site),
        account="selastic",
        log=log,
    )
    controller.listing.jobs = controller.reader.jobs()
    told = report(gpus=4, micro_batch=16, step_time_s=0.1, micro_step_s=0.08, max_micro_batch=64,
                  layers=9, certified=2, certified_penalty=0.001)  # fmt: skip
    controller.report_handler.handle(told, of, act=controller.acts)
    answer = controller.report_handler.orders(7, 0, job=of)
    assert answer.frozen == (2 if mode == "act" else None)
    controller.round()
    choice = controller.view.batches[7]
    assert choice.batch > 64
    assert controller.engine.outbox.orders(7, 0).batch == (choice.batch if mode == "act" else None)
    lines = [line for line in log.lines if "Action=batch" in line]
    assert len(lines) == (mode == "act")
    controller.round()
    assert [line for line in log.lines if "Action=batch" in line] == lines
    assert not [line for line in log.lines if "internal" in line]
    controller.ledger.close()


def test_a_round_decides_with_the_directive_in_force(tmp_path):
    of, site = running(gpus=4, directive="4"), schema.Config()
    controller = Controller(
        config=site,
        reader=Reader(of),
        scontrol=FakeScontrol(),
        ledger=Ledger(tmp_path / "ledger.sqlite"),
        policy=policy_protocol.load(site),
        account="selastic",
        log=Log(),
    )
    controller.store.order(of, override="1-2")
    controller.look()
    assert str(controller.view.snapshot.job[7].directive) == "1-2"
    assert str(controller.job(7).submission.directive) == "4"
    controller.ledger.close()
