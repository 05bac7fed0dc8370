"""Numbers of a training in files of `torch.save`: steps, epoch and learning rate.

The files are a user's, and may contain anything: nothing is unpickled (`pickle_outline`).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

from slurm_elastic.job.environment.regular_file import regular_file
from slurm_elastic.job.unmodified.pickle_outline import TensorOfOne, outline

#: Files of a checkpoint with the state of a scheduler: of accelerate, and of transformers.
_SCHEDULERS = ("scheduler.bin", "scheduler.pt")
#: The same of an optimizer.
_OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
#: Larger files are not read; that of a scheduler has some kilobytes.
_MAX_SCHEDULER = 1 << 20
#: Larger pickles of a whole checkpoint are not read, which takes 0.7 s for each MiB (our choice).
#: Tensors are not in the pickle: one of 1,000 parameters and their optimizer's state has 330 kB.
_MAX_PICKLE = 1 << 20
_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    EOFError,
    BadZipFile,
    zlib.error,
    struct.error,
)

#: Keys of a checkpoint that count the steps of the whole training. Not `step` and `iter`, which
#: some scripts count anew in each epoch; `iteration` only beside no epoch.
_STEPS = ("global_step", "global_steps", "iter_num", "num_updates")
_EPOCH, _ITERATION = "epoch", "iteration"
#: The same in mmengine's `meta`.
_META, _META_STEP = "meta", "iter"
#: In the state of a scheduler and of an optimizer.
_LAST_EPOCH, _LAST_RATE, _GROUPS, _RATE = "last_epoch", "_last_lr", "param_groups", "lr"
#: In the states of parameters, and of groups of these, in an optimizer: the steps that it has made.
_STATES, _UPDATES = "state", "step"
#: In the state of a model with batch normalisation: the batches on which a rank has trained.
_PASSES = "num_batches_tracked"
#: Keys of a checkpoint under which scripts save their options, and a part of the name of one that
#: those of a training have.
_OPTIONS, _BATCH = ("args", "opt", "config", "cfg", "hparams"), "batch_size"
#: Parts of the names of options by which scripts take several batches for a step, or one batch over
#: all ranks.
_ACCUMULATIONS = ("accum", "grad_acc", "update_freq", "iter_size", "nominal")
_WHOLE_BATCHES = ("global_batch", "total_batch", "effective_batch")
#: Numbers in storages of torch, which are little-endian on every machine that it supports.
_FORMATS = {"FloatStorage": "<f", "DoubleStorage": "<d", "LongStorage": "<q", "IntStorage": "<i"}
_SOUGHT = tuple(
    key.encode() for key in (*_STEPS, _EPOCH, _ITERATION, _META_STEP, _LAST_RATE, _RATE)
)


class SavedNumbers(NamedTuple):
    """Numbers of a training in one checkpoint; None: it does not have that one.

    Attributes:
        step: of the optimizer, since the beginning of the training.
        epoch: as the script counts it.
        rate: learning rate of the first group of parameters.
        updates: steps that the optimizer has counted itself, as Adam does. They begin anew in a
            script that does not load its optimizer.
        passes: batches on which each rank has trained, as batch normalisation counts them, where
            the options that are saved beside it show that each of them is a step.
        scheduled: steps of the scheduler in a directory of accelerate's `save_state`.
    """

    step: int | None = None
    epoch: int | None = None
    rate: float | None = None
    updates: int | None = None
    passes: int | None = None
    scheduled: int | None = None


def read_directory(checkpoint: str) -> SavedNumbers:
    """Return the numbers in a checkpoint of several files: learning rate and updates.

    Args:
        checkpoint: directory in which `torch.save` has written the `state_dict` of a scheduler, and
            of an optimizer.
    """
    rate: float | None = None
    updates = scheduled = None
    for name in _SCHEDULERS:
        try:
            path = f"{checkpoint}/{name}"
            with _archive(path, most=_MAX_SCHEDULER, largest=_MAX_SCHEDULER) as archive:
                state = outline(archive.pickle())
        except _ERRORS:
            continue
        rate = _last_rate(state)
        if rate is not None and isinstance(state, dict):
            scheduled = _count(state.get(_LAST_EPOCH)) if name == _SCHEDULERS[0] else None
            break
    for name in _OPTIMIZERS:
        try:
            with _archive(f"{checkpoint}/{name}", most=_MAX_PICKLE) as archive:
                updates = _updates(outline(archive.pickle()), archive)
        except _ERRORS:
            continue
        if updates is not None:
            break
    return SavedNumbers(rate=rate, updates=updates, scheduled=scheduled)


def read_numbers(path: str) -> SavedNumbers:
    """Return the numbers in a checkpoint of one file, a dictionary that `torch.save` has written.

    Args:
        path: of the file.
    """
    try:
        with _archive(path, most=_MAX_PICKLE) as archive:
            data = archive.pickle()
            if not any(key in data for key in _SOUGHT):
                return SavedNumbers()
            return _numbers(outline(data), archive)
    except _ERRORS:
        return SavedNumbers()


def read_object(path: str) -> dict[Any, Any]:
    """Return the plain attributes of an object that `torch.save` has written; {} if unreadable.

    Args:
        path: of a small file, such as the `training_args.bin` of transformers.
    """
    try:
        with _archive(path, most=_MAX_PICKLE, largest=_MAX_PICKLE) as archive:
            value = outline(archive.pickle())
    except _ERRORS:
        return {}
    return value if isinstance(value, dict) else {}


class _Archive(NamedTuple):
    """Open file of `torch.save`."""

    zip: ZipFile
    folder: str

    def pickle(self) -> bytes:
        """Return the pickled object."""
        return self.zip.read(f"{self.folder}data.pkl")

    def number(self, tensor: TensorOfOne) -> float | int | None:
        """Return the number in a tensor; None: its storage is no number of a known type."""
        form = _FORMATS.get(tensor.kind)
        if form is None:
            return None
        with self.zip.open(f"{self.folder}data/{tensor.name}") as storage:
            number: float | int = struct.unpack(form, storage.read(struct.calcsize(form) + 1))[0]
        return number


@contextmanager
def _archive(path: str, *, most: int, largest: int | None = None) -> Iterator[_Archive]:
    """Open a file of `torch.save`.

    Args:
        path: of the file.
        most: bytes of the object.
        largest: bytes of the file; None: of any size.

    Raises:
        OSError, ValueError, LookupError, RuntimeError, EOFError, BadZipFile, zlib.error: there is
            none.
    """
    with regular_file(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        if largest is not None and os.fstat(descriptor).st_size > largest:
            raise ValueError("it is too large")
        with ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if archive.getinfo(names[0]).file_size > most:
                raise ValueError("it is too large")
            yield _Archive(archive, names[0].removesuffix("data.pkl"))


def _numbers(saved: object, archive: _Archive) -> SavedNumbers:
    """Return the step, epoch and rates in a checkpoint."""
    if not isinstance(saved, dict):
        return SavedNumbers()
    meta = saved.get(_META)
    meta = meta if isinstance(meta, dict) else {}
    steps = (*(saved.get(name) for name in _STEPS), meta.get(_META_STEP))
    step = next((number for value in steps if (number := _count(value)) is not None), None)
    epoch = _count(saved.get(_EPOCH, meta.get(_EPOCH)))
    if step is None and epoch is None:
        step = _count(saved.get(_ITERATION))
    rate = updates = None
    for state in _states(saved, "opt"):
        updates = _updates(state, archive) if updates is None else updates
        groups = state.get(_GROUPS)
        first = groups[0] if isinstance(groups, list) and groups else None
        if isinstance(first, dict) and isinstance(first.get(_RATE), float):
            rate = first[_RATE]
            break
    for state in _states(saved, "sched"):
        rate = _last_rate(state) if rate is None else rate
        scheduled = _count(state.get(_LAST_EPOCH))
        # Else the scheduler counts epochs.
        if step is None and epoch is not None and scheduled is not None and scheduled > epoch + 1:
            step = scheduled
    return SavedNumbers(step, epoch, rate, updates, _passes(saved, archive))


def _passes(saved: dict[Any, Any], archive: _Archive) -> int | None:
    """Return the batches on which each rank has trained, if each of them is a step.

    Args:
        saved: outline of a checkpoint.
        archive: file in which that lies.
    """
    options = next(
        (
            value
            for name in _OPTIONS
            if isinstance(value := saved.get(name), dict)
            and any(isinstance(key, str) and _BATCH in key for key in value)
        ),
        None,
    )
    if options is None or any(
        value != 1 and any(word in key.lower() for word in (*_ACCUMULATIONS, *_WHOLE_BATCHES))
        for key, value in options.items()
        if isinstance(key, str)
    ):
        return None
    for name, state in saved.items():
        if isinstance(state, dict) and isinstance(name, str) and "ema" not in name:
            for key, value in state.items():
                if str(key).endswith(_PASSES) and isinstance(value, TensorOfOne):
                    return _count(archive.number(value))
    return None


def _states(saved: dict[Any, Any], word: str) -> Iterator[dict[str, Any]]:
    """Yield the states, alone or in a list, under keys that contain a word."""
    for key, value in saved.items():
        if isinstance(key, str) and word in key:
            for state in value if isinstance(value, list) else (value,):
                if isinstance(state, dict):
                    yield state


def _updates(optimizer: object, archive: _Archive) -> int | None:
    """Return the steps that an optimizer has counted for its first parameter, or group of these.

    Args:
        optimizer: outline of its `state_dict`.
        archive: file in which that lies.
    """
    if not isinstance(optimizer, dict):
        return None
    states, groups = optimizer.get(_STATES), optimizer.get(_GROUPS)
    counted = [*states.values()] if isinstance(states, dict) else []
    counted += groups if isinstance(groups, list) else []
    for state in counted:
        value = state.get(_UPDATES) if isinstance(state, Mapping) else None
        number = archive.number(value) if isinstance(value, TensorOfOne) else value
        if isinstance(number, int | float) and 0 < number < 1 << 62:
            return int(number)
    return None


def _last_rate(scheduler: object) -> float | None:
    """Return the learning rate in the state of a scheduler; None if there is none."""
    rates = scheduler.get(_LAST_RATE) if isinstance(scheduler, dict) else None
    first = rates[0] if isinstance(rates, list) and rates else None
    return first if isinstance(first, float) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else None
