"""Execution plans scheduled with GPUs (Rubick, MLSys'25): `python -m benchmarks.rubick`.

Prints, on the published tables and traces (docs/data.md): look-ups of step times; errors of the
step-time model, with the published coefficients and with ours; what the memory model says of every
plan that was measured; how many plans a running job would try; and each trace under the published
policy, plain rules, and our policy.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurm_elastic.controller.state.trials.plan_trials import FITTED, MARGIN
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.models.execution.plan_fitting import fit, relative_error
from slurm_elastic.models.execution.plan_memory import least_accumulation
from slurm_elastic.models.execution.plan_ranking import predicted_times
from slurm_elastic.models.execution.plan_times import PlanCoefficients
from slurm_elastic.policies.execution.plan_options import Placement
from slurm_elastic.simulator.execution.own_plan_policy import OwnPlanPolicy, requested_step_s
from slurm_elastic.simulator.execution.plan_jobs import PlanJob, read_plan_jobs, read_step_tables
from slurm_elastic.simulator.execution.plan_profiles import PublishedProfile, read_profiles
from slurm_elastic.simulator.execution.plan_simulation import (
    RESTART_S,
    PlanPolicy,
    PlanResult,
    PlanRules,
    PlanRun,
    simulate_plans,
)
from slurm_elastic.simulator.execution.plan_yardsticks import QueuedPlans, SharedPlans
from slurm_elastic.simulator.execution.published_rubick import PublishedRubick
from slurm_elastic.simulator.execution.rubick_models import (
    GPU_BYTES,
    SCHEDULED_MODELS,
    TRANSFORMERS,
)
from slurm_elastic.simulator.execution.sample_limits import sample_limits
from slurm_elastic.simulator.execution.step_table import StepTable, published_plan
from tests.support import published_data

_HOUR = 3600.0
#: On mt the published policy, held to 64 GPUs, restarts large jobs for ever.
_MOST_S = 60 * _HOUR
_HEADER = (
    f"{'trace':6}{'policy':34}{'avg_h':>7}{'p50_h':>7}{'p99_h':>7}{'end_h':>7}"
    f"{'gpu_h':>7}{'most':>6}{'above':>7}{'starts':>7}{'done':>6}"
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rubick")
    published_data.add_option(parser)
    options = parser.parse_args()
    folder = published_data.locate_or_exit(parser, options, "rubick")
    tables = read_step_tables(folder / "tables")
    print_look_ups(folder / "tables", tables)
    profiles = published_data.locate_optional(
        parser,
        options,
        "rubick",
        "profiles/environment.csv",
        "profiles/validation_points.csv",
        without="the errors of the step-time model are left out",
    )
    if profiles is not None:
        print_errors(read_profiles(profiles / "profiles"))
    print_memory(tables)
    print_trials(tables)
    print_simulations(folder, tables)


def print_look_ups(folder: Path, tables: Mapping[str, StepTable]) -> None:
    """Compare each row of the tables with its look-up."""
    equal = rows = 0
    for model, table in tables.items():
        with (folder / f"{model}.csv").open(encoding="utf-8-sig", newline="") as stream:
            for row in csv.DictReader(stream):
                placement = tuple(map(int, row["placement"]))
                plan = published_plan(row["exec_plan"], sum(placement))
                equal += table.step_s(plan, placement) == float(row["iter_time"])
                rows += 1
    print(f"step times: {equal} of {rows} (model, plan, placement) as published\n")


def print_errors(profiles: Mapping[str, PublishedProfile]) -> None:
    """Print errors of the step time by model and plan: mean and maximum, in percent."""
    print("error of the step time, mean / maximum in %; ours: fitted here to the same points")
    print(f"{'model':9}{'plan':18}{'published':>13}{'ours':>13}   to published prediction")
    for model, profile in profiles.items():
        # The published llama coefficients were not fitted.
        own = fit(profile.points, profile.links) if not model.startswith("llama") else None
        published, ours = (
            errors(profile, coefficients) if coefficients else {}
            for coefficients in (profile.fitted, own)
        )
        worst = max(
            relative_error(v.point.predicted(profile.fitted, profile.links).step_ms, v.published_ms)
            for v in profile.validation
        )
        for plan, values in published.items():
            print(
                f"{model:9}{plan:18}{_errors(values):>13}{_errors(ours.get(plan)):>13}"
                f"   {100 * worst:.4f} % at most"
            )
    print()


def errors(profile: PublishedProfile, coefficients: PlanCoefficients) -> dict[str, list[float]]:
    """Return the errors of the step time by plan."""
    by_plan: dict[str, list[float]] = defaultdict(list)
    for validation in profile.validation:
        point = validation.point
        predicted = point.predicted(coefficients, profile.links).step_ms
        by_plan[validation.plan_name].append(relative_error(predicted, point.measured.step_ms))
    return dict(by_plan)


def _errors(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    return f"{100 * statistics.fmean(values):.1f} / {100 * max(values):.1f}"


def print_memory(tables: Mapping[str, StepTable]) -> None:
    """Print which measured plans fit into a GPU by the memory model."""
    print(f"memory model, {GPU_BYTES >> 30} GiB: measured plans that fit, with micro-batches")
    for model, table in tables.items():
        batch, accumulated, fitting, rows = SCHEDULED_MODELS[model].work.batch, {}, 0, 0
        for by_plan in table.seconds.values():
            for plan in by_plan:
                share = max(1, batch // plan.replicas)
                least = least_accumulation(
                    plan, TRANSFORMERS[model], share=share, gpu_bytes=GPU_BYTES
                )
                rows, fitting = rows + 1, fitting + (least is not None)
                if least:
                    accumulated[str(plan)] = least + 1
        needs = ", ".join(f"{plan} in {n}" for plan, n in accumulated.items())
        print(f"{model:9}{fitting:4} of {rows:3}{'  ' + needs if needs else ''}")
    limits = sample_limits()
    equal = sum(limit.published == limit.ours for limit in limits)
    print(f"most samples of a GPU at once: {equal} of {len(limits)} entries as published; not:")
    for limit in limits:
        if limit.published != limit.ours:
            print(f"{limit.model:9}{limit.entry:11}{limit.published:3}, ours {limit.ours}")
    print()


def print_trials(tables: Mapping[str, StepTable]) -> None:
    """Print how many plans with stages or tensor=N are tried, and what those that are not cost."""
    print("plans that plan=auto tries of those measured in an allocation, and its best one's time")
    print("by that of the best of all; random: the mean of 20 orders, and the worst of them")
    print(f"{'model':9}{'placement':>10}{'measured':>10}{'tried':>7}{'time':>7}{'random':>16}")
    for model, placement, by_plan in plan_groups(tables):
        batch = SCHEDULED_MODELS[model].work.batch
        order = sorted(by_plan, key=lambda plan: (plan.stages * plan.tensor, plan.tensor))
        tried = tried_plans(order, by_plan, batch=batch)
        generator, counts, losses = random.Random(1), [], []
        for _ in range(20):
            shuffled = tried_plans(generator.sample(order, len(order)), by_plan, batch=batch)
            counts.append(len(shuffled))
            losses.append(_loss(shuffled, by_plan))
        shown = f"{statistics.fmean(counts):.1f} / {max(losses):.2f}"
        print(
            f"{model:9}{''.join(map(str, placement)):>10}{len(by_plan):10}{len(tried):7}"
            f"{_loss(tried, by_plan):7.2f}{shown:>16}"
        )
    print()


def plan_groups(
    tables: Mapping[str, StepTable],
) -> Iterator[tuple[str, Placement, dict[ExecutionPlan, float]]]:
    """Yield the plans of each placement in which more plans were measured than a fit needs."""
    for model, table in tables.items():
        for placement, seconds in table.seconds.items():
            by_plan = {p: s for p, s in seconds.items() if p.stages * p.tensor > 1}
            if len(by_plan) > FITTED:
                yield model, placement, by_plan


def tried_plans(
    order: Sequence[ExecutionPlan], times: Mapping[ExecutionPlan, float], *, batch: int
) -> list[ExecutionPlan]:
    """Return the plans that `plan=auto` tries, the first of which stands for the job's own choice.

    Args:
        order: order in which they are tried until a fit is possible.
        times: step time of each.
        batch: samples of a step.
    """
    tried = list(order[:FITTED])
    while rest := [plan for plan in order if plan not in tried]:
        predicted = predicted_times({plan: times[plan] for plan in tried}, rest, batch=batch)
        best = min(rest, key=lambda plan: predicted[plan])
        if predicted[best] * MARGIN > min(times[plan] for plan in tried):
            break
        tried.append(best)
    return tried


def _loss(tried: Sequence[ExecutionPlan], times: Mapping[ExecutionPlan, float]) -> float:
    return min(times[plan] for plan in tried) / min(times.values())


def print_simulations(folder: Path, tables: Mapping[str, StepTable]) -> None:
    """Print each trace under each policy."""
    print(_HEADER)
    for trace, file in (("base", "workload-base"), ("mt", "workload-mt")):
        jobs = read_plan_jobs(folder / f"{file}.csv", tables)
        published = PublishedRubick(tables)
        arms: list[tuple[str, PlanPolicy, PlanRules]] = [
            ("published, leaks GPUs", published, PlanRules.published(keeps_taken=True)),
            (
                "published, held to 64",
                PublishedRubick(tables),
                PlanRules(keeps_partial=True, free_moves=True, extra_steps=1, most_s=_MOST_S),
            ),
            (
                "requested, first come",
                QueuedPlans(tables, least_work=False, best_plan=False),
                PlanRules(),
            ),
            (
                "requested, least work (known)",
                QueuedPlans(tables, least_work=True, best_plan=False),
                PlanRules(),
            ),
            (
                "best plan, least work (known)",
                QueuedPlans(tables, least_work=True, best_plan=True),
                PlanRules(),
            ),
            ("simple joint rule (known)", SharedPlans(tables), PlanRules()),
            ("ours (known work)", OwnPlanPolicy(tables, known=True), PlanRules()),
            ("ours (unknown work)", OwnPlanPolicy(tables, known=False), PlanRules()),
        ]
        for name, policy, rules in arms:
            result = simulate_plans(jobs, tables, policy, rules)
            print(f"{trace:6}{name:34}{_figures(result)}{_guarantees(jobs, result, tables)}")


def _figures(result: PlanResult) -> str:
    times = [seconds / _HOUR for seconds in result.completion_s]
    end_h = max(run.finish_s or 0.0 for run in result.runs) / _HOUR
    gpu_h = sum(run.gpu_s for run in result.runs) / _HOUR
    starts = statistics.fmean(run.starts for run in result.runs)
    return (
        f"{statistics.fmean(times):7.3f}{times[len(times) // 2]:7.3f}"
        f"{times[int(0.99 * len(times))]:7.2f}{end_h:7.2f}{gpu_h:7.0f}{result.most_gpus:6}"
        f"{result.full_rounds:7}{starts:7.2f}{len(times):6}"
    )


def _guarantees(
    jobs: Sequence[PlanJob], result: PlanResult, tables: Mapping[str, StepTable]
) -> str:
    """Return broken guarantees, and the average over the other jobs."""
    if not any(job.guaranteed for job in jobs):
        return ""
    guaranteed = [run for run in result.runs if run.job.guaranteed]
    broken = sum(is_broken(run, tables) for run in guaranteed)
    others = [
        run.finish_s - run.job.submit_s
        for run in result.runs
        if not run.job.guaranteed and run.finish_s is not None
    ]
    average = statistics.fmean(others) / _HOUR
    return f"  guarantees broken: {broken} of {len(guaranteed)}; others {average:.3f} h"


def is_broken(run: PlanRun, tables: Mapping[str, StepTable]) -> bool:
    """Return whether a job held GPUs for longer than its request, one start included, would."""
    requested = RESTART_S + run.job.steps * requested_step_s(run, tables)
    return run.finish_s is None or run.training_s > requested * (1 + 1e-9)


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"\n{time.monotonic() - began:.0f} s")
