"""`selastic recommend`: time and cost of a training by configuration, from its profiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from slurm_elastic.cli import options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate import simulation_inputs, simulation_options

if TYPE_CHECKING:
    from slurm_elastic.cli.recommend.recommend_answer import RecommendationAnswer
    from slurm_elastic.profiler.new_model import Estimates, NewModel
    from slurm_elastic.profiler.profile_file import StepProfile
    from slurm_elastic.profiler.profile_merge import MeasuredModel, MergedProfiles
    from slurm_elastic.profiler.recommendation import (
        ConfigurationCost,
        NoConfigurationError,
        Recommendation,
    )

#: Required keys of `--model KEY=VALUE,…`; `compute` also as `compute.TYPE`.
_KEYS = ("layers", "gradient-bytes", "batch", "compute")


@options.verb
@click.argument("more", metavar="[PROFILE]...", nargs=-1)
@click.option(
    "--profile", "profiles", metavar="PROFILE", multiple=True,
    help="Output of `selastic profile`; several may follow.",
)  # fmt: skip
@click.option(
    "--epochs", metavar="N", default="1", show_default=True, help="Epochs of the training."
)
@click.option("--samples", metavar="N", help="Samples per epoch (from the profile).")
@click.option("--deadline", metavar="HOURS", help="Find the cheapest that takes at most HOURS.")
@click.option(
    "--budget", metavar="COST",
    help="Find the fastest that costs at most COST: GPU hours, or money with --price.",
)  # fmt: skip
@click.option(
    "--price", metavar="TYPE=X,…",
    help="Price of a GPU hour by type, e.g. a100=3.2,v100=1.1 (cost in GPU hours).",
)  # fmt: skip
@click.option(
    "--model", metavar="NAME|KEY=VALUE,…",
    help="One of several models, or a model that was not profiled:"
    " layers=50,gradient-bytes=102e6,batch=64,compute.a100=0.2.",
)  # fmt: skip
@click.option(
    "--extrapolate", is_flag=True,
    help="Add estimates for configurations on which only other models were profiled.",
)  # fmt: skip
@click.option("--batch", metavar="N", help="Compare configurations with N samples per GPU.")
@click.option(
    "--global-batch", metavar="N",
    help="Compare configurations with N samples on all GPUs together.",
)  # fmt: skip
@click.option(
    "--uncached", is_flag=True,
    help="The data set does not fit in memory: each epoch reads it from storage.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Include configurations that were measured only once.")
@click.option("--plot", metavar="FILE", help="Draw the answer to a .png, .svg or .pdf file.")
@options.table
@options.as_json
def recommend(
    *,
    more: tuple[str, ...],
    profiles: tuple[str, ...],
    epochs: str,
    samples: str | None,
    deadline: str | None,
    budget: str | None,
    price: str | None,
    model: str | None,
    extrapolate: bool,
    batch: str | None,
    global_batch: str | None,
    uncached: bool,
    once: bool,
    plot: str | None,
    format_: str,
    noheader: bool,
    parsable: bool,
    json_: bool,
) -> None:
    """Compare time and cost of a training on several GPUs.

    From profiles of `selastic profile`. Marks the configurations that no other beats in both
    time and cost. Where none is within a limit, the nearest is named and the exit status is 1.
    See docs/recommend.md.
    """
    from slurm_elastic.cli.recommend import recommend_answer  # noqa: PLC0415
    from slurm_elastic.profiler import profile_merge  # noqa: PLC0415
    from slurm_elastic.profiler.extrapolate import ExtrapolationError  # noqa: PLC0415
    from slurm_elastic.profiler.recommendation import NoConfigurationError, Work  # noqa: PLC0415

    if plot is not None:
        _draw(None, plot)
    limits = {
        "deadline": options.number(deadline, "--deadline") if deadline else math.inf,
        "budget": options.number(budget, "--budget") if budget else math.inf,
    }
    prices = simulation_options.weights(price, "--price") if price else None
    gpu_batch = options.whole_number(batch, "--batch") if batch else None
    global_batch_size = (
        options.whole_number(global_batch, "--global-batch") if global_batch else None
    )
    if global_batch_size and (gpu_batch or extrapolate or "=" in (model or "")):
        raise CliError(
            "--global-batch cannot be combined with --batch or with extrapolation: use --batch",
            USAGE,
        )
    try:
        epoch = options.whole_number(samples, "--samples") if samples else None
        models = profile_merge.subjects(_read((*profiles, *more)), samples=epoch)
        if model is not None and "=" in model:
            unseen = _described_model(model, gpu_batch)
            measured = profile_merge.MergedProfiles((), unknown=("prep", "fetch"))
            name = unseen.name
            estimated = _estimates(unseen, models, measured)
        else:
            subject = _subject(models, model)
            name, estimated = subject.name, None
            if extrapolate:
                gpu_batch = gpu_batch or _per_gpu(subject)
            measured = profile_merge.comparable(
                subject, batch=gpu_batch, global_batch=global_batch_size, once=once
            )
            if gpu_batch and extrapolate:
                from slurm_elastic.profiler.new_model import from_subject  # noqa: PLC0415

                estimated = _estimates(from_subject(subject, gpu_batch), models, measured)
        offers = recommend_answer.offers(measured, estimated)
        work = Work(
            samples=epoch or _samples(models, name),
            epochs=options.whole_number(epochs, "--epochs"),
            always_cold=uncached,
        )
        recommended = recommend_answer.evaluate(
            name, work, measured, estimated, prices=_prices(prices, offers), **limits
        )
    except (profile_merge.ComparisonError, ExtrapolationError) as error:
        raise CliError(clean(error), USAGE) from None
    except NoConfigurationError as error:
        _refuse_limits(error, limits, unit="" if prices else " GPU h")
    if plot is not None:
        _draw(recommended, plot)
    if json_:
        options.put_json(simulation_inputs.plain(recommend_answer.answer(recommended)))
    else:
        options.put(
            recommend_answer.shown(recommended, options.layout(format_, noheader, parsable))
        )


def _read(paths: Sequence[str]) -> list[tuple[str, StepProfile]]:
    from slurm_elastic.profiler import profile_file  # noqa: PLC0415

    if not paths:
        raise CliError("--profile is missing: name an output file of `selastic profile`", USAGE)
    resolved = [Path(p).resolve() for p in paths]
    duplicates = [p for p, r in zip(paths, resolved, strict=True) if resolved.count(r) > 1]
    if duplicates:
        raise CliError(f"duplicate profile {clean(duplicates[-1])}", USAGE)
    try:
        return [(path, profile_file.read(Path(path))) for path in paths]
    except profile_file.ProfileFileError as error:
        raise CliError(clean(error), USAGE) from None


def _subject(models: Mapping[str, MeasuredModel], model: str | None) -> MeasuredModel:
    names = ", ".join(clean(n) for n in models)
    if model is None:
        if len(models) > 1:
            raise CliError(
                f"the profiles are of several models: add --model, one of {names}", USAGE
            )
        return next(iter(models.values()))
    if model not in models:
        raise CliError(f'--model: "{clean(model)}" is unknown; known: {names}', USAGE)
    return models[model]


def _per_gpu(subject: MeasuredModel) -> int:
    """Return the batch per GPU of most configurations, the smallest of equals."""
    counts = Counter(r.configuration.batch for r in subject.rows)
    return min(counts, key=lambda b: (-counts[b], b))


def _described_model(text: str, batch: int | None) -> NewModel:
    """Parse `layers=50,gradient-bytes=102e6,batch=64,compute.a100=0.2`."""
    from slurm_elastic.profiler.new_model import NewModel  # noqa: PLC0415
    from slurm_elastic.profiler.recommendation import StepTimes  # noqa: PLC0415

    values: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in (*_KEYS, "name") and not key.startswith("compute."):
            raise CliError(
                f'--model: "{clean(key)}" is unknown; known: name, {", ".join(_KEYS)},'
                " compute.TYPE",
                USAGE,
            )
        if key in values:
            raise CliError(f"--model: duplicate key {clean(key)}", USAGE)
        values[key] = value
    if batch is not None:
        values.setdefault("batch", str(batch))
    single_gpu_steps = {
        key.partition(".")[2]: StepTimes(
            compute_s=options.number(value, f"--model: {key}"), spread_s=0.0
        )
        for key, value in values.items()
        if key.partition(".")[0] == "compute"
    }
    missing = [k for k in _KEYS[:3] if k not in values] + ([] if single_gpu_steps else ["compute"])
    if missing:
        raise CliError(
            f"--model: {', '.join(missing)} missing; write layers=N,gradient-bytes=N,batch=N"
            " and, of each type of GPU, the seconds of a step on one: compute.a100=0.2",
            USAGE,
        )
    return NewModel(
        name=values.get("name", "the model"),
        layers=options.whole_number(values["layers"], "--model: layers"),
        gradient_bytes=options.number(values["gradient-bytes"], "--model: gradient-bytes"),
        batch=options.whole_number(values["batch"], "--model: batch"),
        single_gpu_steps=single_gpu_steps,
    )


def _estimates(
    unseen: NewModel, models: Mapping[str, MeasuredModel], measured: MergedProfiles
) -> Estimates:
    from dataclasses import replace  # noqa: PLC0415

    from slurm_elastic.profiler.new_model import estimates  # noqa: PLC0415

    types = {r.configuration.gpu_type for s in models.values() for r in s.rows}
    if "" in unseen.single_gpu_steps and "" not in types:
        if len(types) > 1:
            example_type = min(types)
            raise CliError(
                f"--model: compute is ambiguous: expected compute.TYPE, e.g."
                f" compute.{clean(example_type)}=SECONDS; profiled:"
                f" {', '.join(map(clean, sorted(types)))}",
                USAGE,
            )
        unseen = replace(unseen, single_gpu_steps={next(iter(types)): unseen.single_gpu_steps[""]})
    unknown = sorted(set(unseen.single_gpu_steps) - types)
    if unknown:
        raise CliError(
            f"--model: nothing was profiled on {clean(unknown[0])}; profiled:"
            f" {', '.join(map(clean, sorted(types)))}",
            USAGE,
        )
    measured_configurations = [o.configuration for o in measured.offers]
    result = estimates(
        unseen,
        models.values(),
        but=[(p.gpu_type, p.nodes, p.gpus) for p in measured_configurations],
    )
    if not result.estimates and not measured_configurations:
        raise CliError(clean("; ".join(result.left_out) or "nothing to extrapolate from"), USAGE)
    return result


def _samples(models: Mapping[str, MeasuredModel], name: str) -> int:
    samples = models[name].samples if name in models else None
    if samples is None:
        raise CliError(f"the samples per epoch of {clean(name)} are unknown: add --samples", USAGE)
    return samples


def _prices(
    prices: Mapping[str, float] | None, offers: Sequence[ConfigurationCost]
) -> Mapping[str, float] | None:
    if prices is None:
        return None
    types = sorted({o.configuration.gpu_type for o in offers})
    unknown = sorted(set(prices) - set(types))
    if unknown:
        raise CliError(
            f'--price: "{clean(unknown[0])}" is unknown; known: {", ".join(map(clean, types))}',
            USAGE,
        )
    unpriced = [t for t in types if t not in prices]
    if "" in unpriced:
        raise CliError("--price: a profile has no GPU type: set gpu_type in it", USAGE)
    if unpriced:
        missing = ",".join(f"{clean(t)}=X" for t in unpriced)
        raise CliError(
            f"--price: no price for {', '.join(map(clean, unpriced))}: add {missing}", USAGE
        )
    return prices


def _refuse_limits(error: NoConfigurationError, limits: Mapping[str, float], unit: str) -> NoReturn:
    nearest: Recommendation = error.nearest
    name = clean(nearest.offer.configuration)
    hours = math.ceil(nearest.time_s / 36) / 100
    cost = math.ceil(nearest.cost * 100) / 100
    deadline, budget = f"{limits['deadline']:g}", f"{limits['budget']:g}"
    if error.limit == "deadline":
        text = (
            f"--deadline {deadline}: no configuration is that fast; the fastest, {name}, takes"
            f" {hours:g} h: use --deadline {hours:g} or more"
        )
    elif error.limit == "budget":
        text = (
            f"--budget {budget}: no configuration is that cheap; the cheapest, {name}, costs"
            f" {cost:g}{unit}: use --budget {cost:g} or more"
        )
    else:
        text = (
            f"no configuration meets both limits; in {deadline} h the cheapest is {name} for"
            f" {cost:g}{unit}: use --budget {cost:g}, or a later --deadline"
        )
    raise CliError(text, REFUSED)


def _draw(recommended: RecommendationAnswer | None, path: str) -> None:
    """Draw the answer; with None only check that it could be drawn."""
    from slurm_elastic.simulator import plots  # noqa: PLC0415 - slow to import

    try:
        if recommended is None:
            plots.check(Path(path))
        else:
            from slurm_elastic.cli.recommend import recommend_plot  # noqa: PLC0415

            recommend_plot.draw(recommended, Path(path))
    except plots.PlotError as error:
        raise CliError(clean(error), USAGE) from None
