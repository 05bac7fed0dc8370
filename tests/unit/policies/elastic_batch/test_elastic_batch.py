"""Policy `elastic_batch`: factors, batches, admission, times of division, and reasons."""

import dataclasses
import doctest
import json

import numpy as np
import pytest

from benchmarks import elastic_batch as bench
from slurm_elastic.cli import main
from slurm_elastic.config import schema as configs
from slurm_elastic.config.policy_settings import ElasticBatchSettings
from slurm_elastic.config.schema import Config, ConfigError, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.plan import Action, Measurement
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.elastic_batch import division
from slurm_elastic.policies.elastic_batch.division import divide
from slurm_elastic.policies.elastic_batch.elastic_batch import ElasticBatch as Policy
from slurm_elastic.policies.elastic_batch.value_rows import ValueRows, drawn
from slurm_elastic.policies.sia.goodput_rows import Candidate
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node

OURS = ControllerSettings(queue="controller", mode="act", policy="elastic_batch")


def config(**settings):
    return Config(
        controller=OURS,
        resize=ResizeSettings(restart_s=60.0, min_interval_s=0.0, per_hour=999),
        elastic_batch=ElasticBatchSettings(**({"growth": 1e6} | settings)),
    )


def application(**fields):
    """Application with at most 64 samples at once on a GPU; batches of 64 to 1024."""
    types = tuple(TypeProfile(t, least=1, most=64, single=100.0) for t in ("a100", "v100"))
    values = {"name": "net", "initial_batch": 64, "max_batch": 1024, "batch": 128, "types": types}
    return Application(**(values | fields))


def learned(app=None, *, sync=0.1, per_sample=0.01, noise=None, kind="a100"):
    """Measurements: 0.1 s a step and 0.01 s a sample; an all-reduce always takes `sync`."""
    seen = tuple(
        Observation(kind, 1 if g <= 4 else g // 4, g, m, 0.1 + per_sample * m + (g > 1) * sync,
                    0.1 + per_sample * m)
        for g in (1, 2, 4, 8)
        for m in (8, 16, 64)
    )  # fmt: skip
    return Learned(app or application(), seen, noise)


def cluster(nodes=2, kind="a100"):
    return Cluster([node(f"{kind[0]}{i}", 4, kind) for i in range(nodes)])


def add(c, job_id, elastic="1-8", known=None, **more):
    record = dict(more.pop("record", {}))
    if known is not False:
        record["learned"] = known or learned()
    c.add(job_id, elastic=elastic, gpus=int(elastic.split("-")[0]), record=record, **more)


def row(known, *, elastic="1-16", kind="a100", seed=0, **settings):
    c = cluster(4)
    add(c, 1, elastic, known)
    job, record = c.jobs[0], c.records[1]
    model = SpeedModel.fit(Config().speedup, record.measurements)
    rows = ValueRows(config(**settings).elastic_batch)
    candidate = Candidate(job, record, job.directive, model)
    return rows.row(candidate, kind, per_node={"a100": 4, "v100": 4}, most=16, seed=seed)


def decide(c, settings=None, state=None, policy=None, at_once=True):
    settings = settings or config()
    return decide_round(
        c.snapshot(),
        c.records,
        config=settings,
        policy=policy or Policy(settings),
        state=state or {},
        at_once=at_once,
    )


def shapes(plan):
    return {d.job_id: (d.target.gpus if d.target else 0) for d in sorted_(plan)}


def sorted_(plan):
    return sorted(plan.decisions, key=lambda d: d.job_id)


def test_examples_in_the_docs():
    assert doctest.testmod(division).failed == 0


# --- the program ------------------------------------------------------------------------------


def test_every_job_gets_a_gpu_or_there_is_no_division():
    rows = np.array([[-np.inf, 1.0, 5.0]] * 3)
    assert divide(rows, 2) is None
    assert divide(rows, 3).gpus.tolist() == [1, 1, 1]
    assert sorted(divide(rows, 4).gpus.tolist()) == [1, 1, 2]
    assert divide(np.zeros((0, 5)), 4).gpus.tolist() == []
    assert divide(np.full((1, 3), -np.inf), 4) is None


def test_gpus_that_make_no_job_faster_are_left_over():
    rows = np.array([[-np.inf, 1.0, 0.8, 0.7], [-np.inf, 1.0, -np.inf, 0.5]])
    found = divide(rows, 6)
    assert (found.gpus.tolist(), found.value) == ([1, 1], 2.0)


def test_values_that_cannot_be_are_refused():
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            divide(np.array([[-np.inf, bad]]), 1)


# --- factors and batches ----------------------------------------------------------------------


def test_a_factor_is_relative_to_one_gpu_at_its_largest_micro_batch():
    found = row(learned())
    assert found.least == 1
    assert found.value[1] == pytest.approx(1.0, rel=1e-3)
    assert found.unit_rate == pytest.approx(64 / 0.74, rel=0.02)
    # 64 samples on each of 4 GPUs in 0.84 s.
    assert found.value[4] == pytest.approx(4 * 0.74 / 0.84, rel=0.03)
    assert found.batch[[1, 2, 4]].tolist() == [64, 128, 256]


def test_the_batch_stays_in_its_range():
    narrow = row(learned(application(max_batch=128)))
    sizes = np.flatnonzero(np.isfinite(narrow.value))
    assert set(narrow.batch[sizes]) <= set(range(64, 129))
    by_directive = row(learned(), elastic="1-16,batch=100-200")
    assert by_directive.least == 2  # 64 at most fit on one
    sizes = np.flatnonzero(np.isfinite(by_directive.value))
    assert by_directive.batch[sizes].min() >= 100
    assert by_directive.batch[sizes].max() <= 200
    assert row(learned(), elastic="1-16,batch=2000-4000") is None


def test_memory_bounds_the_gpus_unless_batches_are_accumulated():
    known = learned(application(initial_batch=256))
    assert row(known).least == 4
    assert row(known, accumulate=True).least == 1
    fixed = row(learned(), batch="fixed-max")
    assert (fixed.least, set(fixed.batch[fixed.batch > 0])) == (16, {1024})


def test_a_drawn_batch_is_in_the_range_and_stays():
    for seed in range(20):
        batch = drawn("7@0", (64, 1024), seed)
        assert 64 <= batch <= 1024
        assert batch == drawn("7@0", (64, 1024), seed)
        found = row(learned(), batch="fixed-random", accumulate=True, seed=seed)
        assert len(set(found.batch[found.batch > 0])) == 1
    assert len({drawn(f"{i}@0", (64, 1024), 0) for i in range(20)}) > 10


def test_statistical_efficiency_keeps_batches_small_where_noise_is_small():
    quiet = learned(noise=Noise(sqr=1.0, var=1.0))
    assert row(quiet).batch[8] == 512
    careful = row(quiet, statistical=True)
    assert 64 <= careful.batch[8] < 256
    assert row(learned(), statistical=True).batch[8] == 512  # nothing is known of its noise


def test_jobs_that_keep_their_batch_get_no_order():
    for job_class in (JobClass.STRONG_SCALING, JobClass.RIGID):
        known = learned(application(job_class=job_class, gpus=4))
        found = row(known)
        assert not found.batch.any()
        sizes = np.flatnonzero(np.isfinite(found.value)).tolist()
        assert sizes == [4] if job_class is JobClass.RIGID else len(sizes) > 3
    assert not row(False).batch.any()
    assert row(False).value[1] == pytest.approx(1.0)


def test_only_sizes_that_can_be_shared_evenly_over_few_nodes():
    found = np.flatnonzero(np.isfinite(row(learned()).value)).tolist()
    assert found == [1, 2, 3, 4, 6, 8, 9, 10, 12, 14, 15, 16]


def test_a_job_grows_to_at_most_so_many_times_what_it_was_measured_on():
    few = Learned(application(), learned().observations[:3])
    assert row(few, growth=2.0).top == 2
    assert row(few, growth=4.0).top == 4


# --- divisions --------------------------------------------------------------------------------


def test_gpus_and_batches_go_together():
    c = cluster()
    for job_id in (1, 2):
        add(c, job_id)
    plan, state = decide(c)
    assert shapes(plan) == {1: 4, 2: 4}
    assert [d.batch for d in sorted_(plan)] == [256, 256]
    assert "times its speed on one, with 256 samples" in words(plan.decision[1].reason)
    c.carry_out(plan)
    add(c, 3)
    kept, state = decide(c, state=state)
    assert shapes(kept) == {1: 4, 2: 4, 3: 0}
    assert "not even" not in words(kept.decision[3].reason)
    assert words(kept.decision[3].reason).startswith("GPUs are divided next at")
    c.time += 600
    plan, _ = decide(c, state=state)
    assert sum(shapes(plan).values()) == 8
    assert shapes(plan)[3] > 0


def test_a_job_that_scales_gets_more():
    c = cluster()
    add(c, 1, known=learned(sync=5.0))
    add(c, 2, known=learned(sync=0.01))
    assert shapes(decide(c)[0]) == {1: 1, 2: 6}


def test_a_job_on_unchanged_gpus_is_not_touched_and_ties_change_nothing():
    c = cluster()
    seen = Measurement(gpu_type="a100", gpus=1, nodes=1, samples_per_s=100.0, steps=99)
    add(c, 1, known=False, on={"a0": 2}, record={"measurements": (seen,)})
    add(c, 2, known=False, on={"a0": 2, "a1": 4}, record={"measurements": (seen,)})
    linear = configs.SpeedupSettings(loss_in_node=0.0, loss_across_nodes=0.0)
    plan, _ = decide(c, dataclasses.replace(config(), speedup=linear))
    assert plan.changes == ()
    plan, _ = decide(c)
    assert shapes(plan) == {1: 4, 2: 4}


def test_jobs_are_admitted_in_order_without_overtaking():
    c = cluster()
    add(c, 1, "6-8")
    add(c, 2, "4-8")
    add(c, 3, "1-8")
    plan, _ = decide(c)
    assert shapes(plan) == {1: 8, 2: 0, 3: 0}
    assert words(plan.decision[2].reason).startswith("waits for 4 a100")


def test_a_job_that_can_never_run_blocks_no_other():
    c = cluster()
    add(c, 1, "64-128")
    add(c, 2, "1-8,batch=5000-6000")
    add(c, 3, "1-8")
    plan, _ = decide(c)
    assert shapes(plan) == {1: 0, 2: 0, 3: 8}
    assert "the cluster has no 64 GPUs" in words(plan.decision[1].reason)
    assert "no batch that it allows fits" in words(plan.decision[2].reason)


def test_dropped_for_good_and_left_pending_with_a_reason():
    c = cluster(1)
    for job_id in (1, 2, 3, 4):
        add(c, job_id, "1-4", on={"a0": 1})
    add(c, 5)
    drop = config(mode="drop")
    plan, state = decide(c, drop)
    assert shapes(plan)[5] == 0
    assert plan.decision[5].dropped
    assert "rejected, not queued again" in words(plan.decision[5].reason)
    c.jobs, c.time = [j for j in c.jobs if j.job_id > 3], c.time + 600
    later, later_state = decide(c, drop, state)
    assert shapes(later) == {4: 4, 5: 0}
    assert later.decision[5].dropped
    # In the other mode it waits like all others.
    again, _ = decide(c, config(), {**later_state, "policy": {**later_state["policy"], "at": 0.0}})
    assert shapes(again)[5] > 0


def test_between_divisions_freed_gpus_stay_free_and_admitted_jobs_still_start():
    c = cluster()
    add(c, 1, on={"a0": 4, "a1": 4})
    add(c, 2)
    live, state = decide(c, at_once=False)
    assert shapes(live) == {1: 4, 2: 0}  # what 1 gives up is not free yet
    c.carry_out(live)
    c.time += 30
    live, state = decide(c, state=state, at_once=False)
    assert shapes(live) == {1: 4, 2: 4}
    assert live.decision[2].action is Action.START
    c.carry_out(live)
    c.jobs, c.time = [c.jobs[0]], c.time + 30
    quiet, _ = decide(c, state=state, at_once=False)
    assert shapes(quiet) == {1: 4}


def test_a_smaller_cluster_is_divided_at_once():
    c = cluster()
    add(c, 1)
    plan, state = decide(c)
    assert shapes(plan) == {1: 8}
    c.nodes = [c.nodes[0]]
    plan, _ = decide(c, state=state)
    assert shapes(plan) == {1: 4}


def test_the_guard_divides_at_once_and_lets_the_overdue_overtake():
    c = cluster()
    add(c, 1, on={"a0": 4, "a1": 4})
    add(c, 2, "8-8")
    plan, state = decide(c)
    assert shapes(plan) == {1: 8, 2: 0}
    add(c, 3, submit_time=c.time - 10)
    late = config(starvation_s=300.0)
    c.time += 100
    assert shapes(decide(c, late, state)[0])[3] == 0
    c.time += 200
    assert shapes(decide(c, config(), state)[0])[3] == 0
    plan, _ = decide(c, late, state)
    assert (shapes(plan)[2], shapes(plan)[3] > 0) == (0, True)


def test_a_restart_has_to_pay():
    c = cluster()
    known = learned(sync=0.35)  # 8 GPUs are worth a little more than 4
    add(c, 1, "4-8", known, on={"a0": 4})
    assert shapes(decide(c)[0]) == {1: 8}
    c.records[1] = dataclasses.replace(c.records[1], restart_s=500.0)
    assert shapes(decide(c)[0]) == {1: 8}
    assert shapes(decide(c, config(restart_cost=True))[0]) == {1: 4}
    assert shapes(decide(c, config(restart_cost=True, interval_s=1e4))[0]) == {1: 8}
    c.records[1] = dataclasses.replace(c.records[1], in_place=True)
    assert shapes(decide(c, config(restart_cost=True))[0]) == {1: 8}, "without a restart"


def test_each_type_is_a_pool_and_no_job_changes_its_type():
    c = Cluster([node("a0", 4, "a100"), node("v0", 4, "v100")])
    add(c, 1, on={"v0": 2})
    add(c, 2, "1-8,types=v100:a100")
    add(c, 3)
    plan, _ = decide(c)
    found = {d.job_id: (d.target.gpu_type, d.target.gpus) for d in plan.decisions}
    assert found[3] == ("a100", 4)
    assert (found[1][0], found[2][0], found[1][1] + found[2][1]) == ("v100", "v100", 4)


def test_a_job_that_may_not_run_as_it_does_gets_what_it_asks_for_now():
    c = cluster()
    add(c, 1, "4-8", on={"a0": 2})
    add(c, 2, "1-8", on={"a0": 2, "a1": 4})
    plan, _ = decide(c)
    assert shapes(plan)[1] >= 4
    assert sum(shapes(plan).values()) == 8


def test_with_slurms_queue_only_running_jobs_are_divided():
    c = cluster()
    add(c, 1, on={"a0": 2})
    add(c, 2)
    slurm = dataclasses.replace(config(), controller=dataclasses.replace(OURS, queue="slurm"))
    plan, _ = decide(c, slurm, at_once=False)
    assert (plan.decision[1].target.gpus, plan.decision[2].target) == (6, None)


def test_what_the_ledger_kept_of_others_is_forgotten():
    c = cluster()
    add(c, 1)
    state = {"policy": {"at": 0.0, "targets": {"99@0": ["a100", 8, 64]}, "dropped": ["99@0"]}}
    plan, after = decide(c, state=state)
    assert shapes(plan) == {1: 8}
    assert list(after["policy"]["targets"]) == [c.jobs[0].key]
    assert after["policy"]["dropped"] == []


# --- configuration ----------------------------------------------------------------------------


def test_it_is_known_and_its_options_are_read():
    assert "elastic_batch" in policy_protocol.known()
    text = '[elastic_batch]\nmode = "drop"\nbatch = "fixed-max"\nstarvation_s = 60'
    found = configs.parse(text).elastic_batch
    assert (found.mode, found.batch, found.starvation_s) == ("drop", "fixed-max", 60.0)
    for bad, message in (
        ('mode = "cancel"', 'mode "cancel" is unknown; known: queue, drop'),
        ('batch = "max"', 'batch "max" is unknown; known: elastic, fixed-max, fixed-random'),
        ("interval_s = -1", "interval_s = -1 is invalid: expected 0 to"),
        ("growth = 0.5", "growth = 0.5 is invalid: expected 1 to"),
        ("restart_cost = 1", "restart_cost = 1 is invalid: expected true or false"),
        ("delta_s = 600", "delta_s is unknown in"),
    ):
        with pytest.raises(ConfigError, match=f"elastic.toml:2: {message}".replace("[", r"\[")):
            configs.parse(f"[elastic_batch]\n{bad}")


# --- simulations ------------------------------------------------------------------------------


def test_a_small_workload_as_in_the_paper():
    jobs = bench.workload(8, "high", hours=1.0, wide=2)
    case = bench.Case(gpus=8, wide=2)
    elastic = bench.run(jobs, case, ElasticBatchSettings())
    fixed = bench.run(jobs, case, ElasticBatchSettings(batch="fixed-max"))
    assert len(elastic.jobs) == len(fixed.jobs) == len(jobs.jobs)
    assert elastic.summary()["avg_jct_h"] < fixed.summary()["avg_jct_h"]
    assert all(sum(g for _, g in r.held) <= 8 for r in elastic.rounds)
    assert {j.name: j.completion_s for j in elastic.jobs} == {
        j.name: j.completion_s for j in bench.run(jobs, case, ElasticBatchSettings()).jobs
    }


def test_dropped_jobs_end_a_simulation_without_having_run():
    jobs = bench.workload(8, "high", hours=1.0, wide=2)
    case = bench.Case(gpus=8, wide=2)
    lost = {}
    for name in ("elastic", "fixed-max"):
        result = bench.run(jobs, case, ElasticBatchSettings(batch=name, mode="drop"))
        assert len(result.jobs) + len(result.dropped) == len(jobs.jobs)
        assert not {j.name for j in result.jobs} & set(result.dropped)
        lost[name] = len(result.dropped)
    assert lost["elastic"] < lost["fixed-max"]


def test_the_benchmark_counts_what_it_says():
    jobs = bench.workload(40, "low", hours=1.0)
    assert len(jobs.jobs) == round(0.4 * 40 * 1.0 / (3.5 / 3))
    table = bench.applications(4)[0][1]
    assert table.batches == (64, 2048)
    rows = bench.factors(4, 6)
    assert bench.plain(rows, 9) == pytest.approx(divide(rows, 9).value)


def test_dropped_jobs_are_in_the_output(tmp_path, capsys):
    def run(*words):
        code = main.run([str(w) for w in words])
        out = capsys.readouterr()
        assert code == 0, out.err
        return out.out

    site, jobs = tmp_path / "elastic.toml", tmp_path / "jobs.csv"
    site.write_text('[elastic_batch]\nmode = "drop"\n')
    run("workload", "generate", "--jobs", 9, "--hours", 0.3, "--mix", "resnet18=1", "-o", jobs)
    words = [jobs, "--config", site, "--cluster", "v100:1x1", "--jobs", 1]
    said = json.loads(run("simulate", *words, "--policy", "elastic_batch", "--json"))
    assert said["jobs"] + said["dropped"] == 9
    assert said["dropped"] > 0
    text = run("simulate", *words, "--policy", "elastic_batch")
    assert f"rejected          {said['dropped']} more jobs" in text
    text = run("compare", *words, "--policies", "elastic_batch,fifo")
    assert f"elastic_batch rejected {said['dropped']} jobs" in text
    assert "fifo rejected" not in text
