"""The runs of a profile, with a fake runner, and the directory of measurements."""

import contextlib
import json
import os
from dataclasses import replace

import pytest

from slurm_elastic.job.profile_request import answer, asked, write
from slurm_elastic.profiler.profile_file import (
    ProfiledUse,
    ProfileFileError,
    from_body,
    read,
    to_body,
)
from slurm_elastic.profiler.profile_store import ProfileStore, StoreError
from slurm_elastic.profiler.profiling_plan import (
    PlanError,
    ProfiledShape,
    blocks,
    default_shapes,
    needs,
    next_launch,
)
from slurm_elastic.profiler.profiling_runs import ProfilingRequest, profile, run
from slurm_elastic.profiler.run_use import UseSample
from slurm_elastic.profiler.runners import FinishedRun, LocalRunner

#: Seconds of a step by GPUs and block.
TIMES = {"synthetic": 1.0, "warm": 1.5, "cold": 3.0}
#: Times at which the blocks of a run end, epoch s.
ENDED = {"synthetic": 100.0, "cold": 200.0, "warm": 300.0}
FACTS = {"batch": 8, "layers": 3, "gradient_bytes": 4096, "samples": 100, "model": "Net"}


class FakeRunner:
    """`Runner` whose programs answer at once.

    Attributes:
        launches: (shape, blocks) of all starts.
        samples: what each run uses.
    """

    gpus = (4, 4)
    samples = ()

    def __init__(self, *, library=True, fails=(), says=None, code=0):
        self.library, self.fails, self.says, self.code = library, fails, says, code
        self.launches, self.dropped, self.drops = [], [], True

    def run(self, program, shape, environment, *, log, timeout_s):
        wanted = asked(environment)
        self.launches.append((str(shape), wanted.blocks if wanted else None))
        log.write_text("line one\n" + (self.says or "") + "\n")
        if str(shape) in self.fails:
            log.write_text("Traceback\nCUDA out of memory\n")
            return FinishedRun(1)
        if wanted and not self.says and not self.code:
            rows = [
                {
                    "block": b,
                    "seconds": [TIMES[b] + 0.1 * (shape.gpus - 1)] * wanted.steps,
                    "ended": ENDED[b],
                }
                for b in (wanted.blocks if self.library else wanted.blocks[:1])
            ]
            write(wanted.result, rows, FACTS)
        return FinishedRun(self.code, self.samples)

    def drop(self, paths, shape):
        self.dropped.append(str(shape))
        return self.drops


def request(shapes=("2",), *, repeats=2, cold=False, whole_runs=False):
    kinds = blocks(cold=cold, whole_runs=whole_runs)
    return ProfilingRequest(
        program=("train",),
        needs=tuple(needs([ProfiledShape.parse(s) for s in shapes], repeats=repeats, blocks=kinds)),
        steps=4,
        warm_up=1,
        batch=None,
        data=("/data",) if cold else (),
        whole_runs=whole_runs,
        timeout_s=5,
    )


def quiet(done, total, what):
    assert done < total


def outcome(store, **options):
    options = {"application": "", "gpu_type": "a100", "batch": None, "whole_runs": False} | options
    return profile(store, **options)


def test_repeats_go_through_all_shapes_and_a_shape_is_run_once_each_time(tmp_path):
    fake, store = FakeRunner(), ProfileStore(tmp_path / "d", {}, again=False)
    assert run(request(["2", "2@2"]), fake, store, quiet) == []
    both = ("synthetic", "warm")
    assert fake.launches == [(s, both) for s in ("1", "2", "2@2")] * 2
    step_profile = outcome(store)
    assert [(c.gpus, c.nodes, c.batch) for c in step_profile.configurations] == [
        (1, 1, 8), (2, 1, 8), (2, 2, 8),
    ]  # fmt: skip
    assert (step_profile.layers, step_profile.gradient_bytes, step_profile.samples) == (
        3,
        4096,
        100,
    )
    assert step_profile.configurations[1].prep.seconds == pytest.approx(0.5)


def using(begin, **use):
    return UseSample(begin, begin + 5.0, ProfiledUse(**use))


def test_what_each_shape_used_is_that_of_warm_data_but_for_reading(tmp_path):
    fake, store = FakeRunner(), ProfileStore(tmp_path / "d", {}, again=False)
    fake.samples = [
        using(188.0, busy_cpus=8.0, read_bytes_s=5e7),
        using(215.0, busy_cpus=50.0, read_bytes_s=9e9),
        using(294.0, busy_cpus=2.0, read_bytes_s=0.0, memory_bytes_s=1e9),
    ]
    assert run(request(["2"], cold=True), fake, store, quiet) == []
    expected = ProfiledUse(busy_cpus=2.0, read_bytes_s=5e7, memory_bytes_s=1e9)
    for known in (store, ProfileStore(tmp_path / "d", {}, again=False)):
        measured = outcome(known)
        assert {c.use for c in measured.configurations} == {expected}
        assert from_body(json.loads(json.dumps(to_body(measured)))) == measured


def test_a_block_without_the_time_of_its_end_was_the_last_one(tmp_path):
    fake = FakeRunner(says="selastic-profile: steps=4 seconds=6.0")
    fake.samples = [using(60.0, busy_cpus=9.0), using(70.0, busy_cpus=3.0)]
    store = ProfileStore(tmp_path / "d", {}, again=False)
    assert run(request(["1"], repeats=1), fake, store, quiet) == []
    assert outcome(store).configurations[0].use == ProfiledUse(busy_cpus=3.0)


def test_a_second_call_makes_only_missing_runs(tmp_path):
    settings = {"program": ["train"]}
    run(request(repeats=1), FakeRunner(), ProfileStore(tmp_path, settings, again=False), quiet)
    fake, store = FakeRunner(), ProfileStore(tmp_path, settings, again=False)
    (tmp_path / "2-warm-1.json").write_text("{torn")
    store = ProfileStore(tmp_path, settings, again=False)
    run(request(repeats=2), fake, store, quiet)
    assert fake.launches == [
        ("2", ("warm",)), ("1", ("synthetic", "warm")), ("2", ("synthetic", "warm")),
    ]  # fmt: skip
    fake = FakeRunner()
    assert run(request(repeats=2), fake, ProfileStore(tmp_path, settings, again=False), quiet) == []
    assert fake.launches == []


def test_other_settings_need_another_directory_or_again(tmp_path):
    run(request(repeats=1), FakeRunner(), ProfileStore(tmp_path, {"steps": 4}, again=False), quiet)
    with pytest.raises(StoreError, match=r"another steps.*--again"):
        ProfileStore(tmp_path, {"steps": 5}, again=False)
    (tmp_path / "mine.txt").write_text("keep")
    assert ProfileStore(tmp_path, {"steps": 5}, again=True).steps == {}
    assert (tmp_path / "mine.txt").exists()


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    class Interrupted(FakeRunner):
        def run(self, program, shape, environment, *, log, timeout_s):
            if len(self.launches) == 1:
                raise KeyboardInterrupt
            return super().run(program, shape, environment, log=log, timeout_s=timeout_s)

    with pytest.raises(KeyboardInterrupt):
        run(request(), Interrupted(), ProfileStore(tmp_path, {}, again=False), quiet)
    fake = FakeRunner()
    run(request(), fake, ProfileStore(tmp_path, {}, again=False), quiet)
    assert [shape for shape, _ in fake.launches] == ["2", "1", "2"]


def test_a_failed_run_is_reported_and_the_others_are_made(tmp_path):
    fake, store = FakeRunner(fails=("2",)), ProfileStore(tmp_path, {}, again=False)
    failures = run(request(["2", "4"]), fake, store, quiet)
    assert [(str(f.launch.shape), f.reason) for f in failures] == [("2", "ended with exit code 1")]
    assert failures[0].tail[-1] == "CUDA out of memory"
    assert [shape for shape, _ in fake.launches] == ["1", "2", "4", "1", "4"]
    assert [c.gpus for c in outcome(store).configurations] == [1, 4]


def test_a_script_that_does_one_block_at_a_time_is_started_once_for_each(tmp_path):
    fake, store = FakeRunner(library=False), ProfileStore(tmp_path, {}, again=False)
    assert run(request(["1"], repeats=1, cold=True), fake, store, quiet) == []
    assert [b[0] for _, b in fake.launches] == ["synthetic", "cold", "warm"]
    assert fake.dropped == ["1"]  # its cold run began with a cold cache


def test_reads_that_could_not_be_made_cold_are_not_measured(tmp_path):
    fake, store = FakeRunner(library=False), ProfileStore(tmp_path, {}, again=False)
    fake.drops = False
    (failure,) = run(request(["1"], repeats=1, cold=True), fake, store, quiet)
    assert "would not be cold" in failure.reason
    assert [b[0] for _, b in fake.launches] == ["synthetic"]  # and the rest of this shape is left


def test_a_script_may_print_its_times(tmp_path):
    fake = FakeRunner(says="selastic-profile: steps=10 seconds=2.5 batch=16")
    store = ProfileStore(tmp_path, {}, again=False)
    assert run(request(["1"], repeats=1), fake, store, quiet) == []
    (configuration,) = outcome(store).configurations
    assert (configuration.compute.seconds, configuration.batch) == (0.25, 16)


def test_a_script_that_reports_no_steps_is_a_failure_unless_run_as_a_whole(tmp_path):
    fake = FakeRunner(says="epoch 1: loss 0.3")
    (failure,) = run(request(["1"]), fake, ProfileStore(tmp_path, {}, again=False), quiet)
    assert "--whole" in failure.reason
    fake = FakeRunner(says="epoch 1: loss 0.3")
    store = ProfileStore(tmp_path, {}, again=True)
    assert run(request(["1"], cold=True, whole_runs=True), fake, store, quiet) == []
    assert [b for _, b in fake.launches] == [None] * 4  # it is not asked for anything
    assert outcome(store, whole_runs=True).configurations[0].prep is None


def test_invalid_answers_are_ignored(tmp_path):
    store = ProfileStore(tmp_path, {}, again=False)
    launch = next_launch(request(["1"]).needs)
    row = {"block": "warm", "seconds": [0.1]}
    for wrong in (
        None, [], {"blocks": 3}, {"blocks": [7]}, {"blocks": [row | {"block": "../x"}]},
        {"blocks": [row | {"seconds": []}]}, {"blocks": [row | {"seconds": [-1.0]}]},
        {"blocks": [row | {"seconds": [float("nan")]}]}, {"blocks": [row | {"seconds": [True]}]},
    ):  # fmt: skip
        assert store.keep(launch, wrong) == []
    assert store.keep(launch, {"blocks": [row], "facts": "none"}) == ["warm"]
    assert store.facts == {}


def test_answer_writes_the_file_of_the_request(tmp_path, monkeypatch):
    assert asked({}) is None
    launch = next_launch(request(["1"]).needs)
    store = ProfileStore(tmp_path, {}, again=False)
    path = store.answer(launch)
    for name, value in {
        "SLURM_ELASTIC_PROFILE": str(path),
        "SLURM_ELASTIC_PROFILE_BLOCKS": "synthetic,warm",
    }.items():
        monkeypatch.setenv(name, value)
    answer(steps=4, seconds=2.0, batch=8)
    assert store.keep(launch, store.read_answer(path)) == ["synthetic"]
    assert list(store.steps.values()) == [0.5]


def test_default_shapes_and_invalid_shapes():
    assert [str(s) for s in default_shapes([0])] == ["1"]
    assert [str(s) for s in default_shapes([4])] == ["1", "4"]
    assert [str(s) for s in default_shapes([1, 1, 1])] == ["1", "3@3"]
    for wrong in ("", "x", "3@2", "0", "4@0", "-1"):
        with pytest.raises(PlanError):
            ProfiledShape.parse(wrong)


def test_invalid_profile_files_are_refused(tmp_path):
    store = ProfileStore(tmp_path, {}, again=False)
    run(request(["1"]), FakeRunner(), store, quiet)
    step_profile = outcome(store)
    body = json.loads(json.dumps(to_body(step_profile)))
    assert from_body(body) == step_profile
    configuration = body["configurations"][0]
    for wrong, named in (
        ({"profile": 2}, "profile: 2 is invalid"),
        ({"configurations": []}, "configurations"),
        (
            {"configurations": [configuration, configuration]},
            r"\[1\]: type, shape and batch of \[0\]",
        ),
        ({"configurations": [configuration | {"gpus": 0}]}, r"configurations\[0\].gpus"),
        ({"configurations": [configuration | {"nodes": 9}]}, "gpus: 1 is invalid"),
        ({"configurations": [configuration | {"compute": {"seconds": 0}}]}, "compute"),
        ({"configurations": [configuration | {"prep": {"seconds": -1}}]}, "prep.seconds"),
        ({"configurations": [configuration | {"prep": [1]}]}, "prep"),
        ({"configurations": [configuration | {"use": {"gpu_busy": "all"}}]}, "use.gpu_busy"),
        ({"configurations": [configuration | {"use": 3}]}, "use"),
        ({"model": "a\x1b[31m"}, "model"),
        ({"layers": True}, "layers"),
    ):
        with pytest.raises(ProfileFileError, match=named):
            from_body(body | wrong)
    path = tmp_path / "no.json"
    with pytest.raises(ProfileFileError, match="No such file"):
        read(path)
    path.write_text("[1, 2")
    with pytest.raises(ProfileFileError, match="not JSON"):
        read(path)


def test_a_program_that_takes_too_long_is_ended(tmp_path):
    slow = ("sh", "-c", "echo begun; echo $$ > pid; exec sleep 600")
    asks = replace(request(["1"], repeats=1), program=slow, timeout_s=2.0)
    with contextlib.chdir(tmp_path):
        (failure,) = run(asks, LocalRunner(1), ProfileStore(tmp_path / "d", {}, again=False), quiet)
    assert "longer than --timeout 2 s" in failure.reason
    assert failure.tail == ("begun",)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
