"""Evidence in the contents of a checkpoint that the save that writes it is over.

Directories of known libraries are recognised by the names in them. The order in which each library
writes was read in its source (docs/esrun-scripts.md, "Known formats", has the versions).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import NamedTuple

from slurm_elastic.job.environment.regular_file import regular_file

#: Beginnings or ends of names of files that are still being written.
_TEMPORARY = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock", "~")
_ORBAX_TEMPORARY = ".orbax-checkpoint-tmp"
#: Ends of names of copies of an earlier version (`BackupAndRestore` of Keras: `.bkp`).
_BACKUP = (".bkp", ".bak", ".backup", ".old")

_HF_STATE, _HF_ARGUMENTS = "trainer_state.json", "training_args.bin"
_HF_RANK = re.compile(r"rng_state_(\d+)\.pth")
_HF_RESUMABLE = re.compile(r"(optimizer|scheduler|scaler|rng_state)[^/]*$|(global_step|optimizer_)")
_ACCELERATE_RANK = re.compile(r"random_states_(\d+)\.pkl")
_ACCELERATE_EARLY = ("optimizer.bin", "scheduler.bin")
#: The first rank writes this after the weights (`.safetensors`), and all else by which it resumes.
_ACCELERATE_FIRST_RANK, _WEIGHTS_SUFFIX = "random_states_0.pkl", ".safetensors"
_DEEPSPEED = re.compile(
    r"(?P<tag>(?:[^/]+/)?)(?:(?P<zero>(?:bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_\w+)"
    r"|(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states|layer_\d+\S*-model_\S*states)\.pt"
)
_DCP_SUFFIX, _DCP_INDEX = ".distcp", ".metadata"
_LIGHTNING_LAST = "meta.pt"
#: Times on different hosts of one file system may differ by so much (our choice).
_CLOCK_NS = 2_000_000_000
_MAX_TAG = 4096


class Evidence(IntEnum):
    """Evidence of a checkpoint, in ascending order: the least of its parts is that of the whole."""

    #: A new directory or file with nothing in it.
    EMPTY = 0
    #: Part of it is missing: it cannot be loaded, however long nothing changes.
    CUT = 1
    #: The format's last file is missing; perhaps the script never writes it.
    LACKING = 2
    #: The format is not known, or more bytes may follow.
    UNKNOWN = 3
    #: The last byte of the file is written.
    WHOLE = 4


class FileVersion(NamedTuple):
    """One version of a file.

    Attributes:
        inode: number, of a replaced file another one.
        size: bytes.
        changed_ns: time of the last change, by the file system.
    """

    inode: int
    size: int
    changed_ns: int


#: Function that returns whether a file of a checkpoint is whole, by its path below the checkpoint.
Whole = Callable[[str], bool | None]


def is_temporary(name: str) -> bool:
    """Return whether the name is one of a file or directory that is still being written."""
    base = name.lower()
    return base.startswith((".", "tmp")) or base.endswith(_TEMPORARY) or _ORBAX_TEMPORARY in base


def is_backup(name: str) -> bool:
    """Return whether the name is one of a copy of an earlier version."""
    return name.lower().endswith(_BACKUP)


def directory_evidence(
    path: str, files: Mapping[str, FileVersion], whole: Whole, *, ranks: int | None
) -> Evidence:
    """Return the evidence of a directory for a complete checkpoint.

    Args:
        path: of the directory.
        files: its contents: path below the directory → version.
        whole: result of `whole_files.is_whole`.
        ranks: of the script; None: unknown.
    """
    if any(whole(name) is False for name in files):
        return Evidence.CUT
    evidence = _by_format(path, files, whole, ranks)
    if evidence is Evidence.WHOLE and any(
        is_temporary(name.rpartition("/")[2]) and not _is_index(name) for name in files
    ):
        return Evidence.UNKNOWN
    return evidence


def is_followed(name: str, files: Mapping[str, FileVersion], whole: Whole) -> bool:
    """Return whether a file that shows no end itself is whole, as its writer has gone on.

    accelerate's first rank writes weights, then its random states. The index of torch's distributed
    checkpoint is renamed into place after all shards.

    Args:
        name: of the file: path below the directory.
        files: contents of the directory.
        whole: result of `whole_files.is_whole`.
    """
    if name.endswith((_DCP_SUFFIX, _DCP_INDEX)):
        index = files.get(name.rpartition("/")[0] + "/" * ("/" in name) + _DCP_INDEX)
        return index is not None and files[name].changed_ns <= index.changed_ns
    last = files.get(_ACCELERATE_FIRST_RANK)
    is_later = last is not None and files[name].changed_ns <= last.changed_ns
    return is_later and name.endswith(_WEIGHTS_SUFFIX) and whole(_ACCELERATE_FIRST_RANK) is True


def _by_format(
    path: str, files: Mapping[str, FileVersion], whole: Whole, ranks: int | None
) -> Evidence:
    if _HF_STATE in files or _HF_ARGUMENTS in files:
        return _hf_trainer(files, whole, ranks)
    shards = _sharded(files, ranks)
    if shards < Evidence.UNKNOWN:
        return shards
    if any(_ACCELERATE_RANK.fullmatch(name) for name in files) or any(
        name in files for name in _ACCELERATE_EARLY
    ):
        return _accelerate(files, ranks)
    if any(_DEEPSPEED.fullmatch(name) for name in files):
        return _deepspeed(path, files, whole, ranks)
    if shards is Evidence.WHOLE:
        return _lightning(path, files, whole)
    return Evidence.UNKNOWN


def _hf_trainer(files: Mapping[str, FileVersion], whole: Whole, ranks: int | None) -> Evidence:
    """Return how complete a `checkpoint-N` of transformers' Trainer is.

    Rank 0 writes model, optimizer, scheduler, then `trainer_state.json`; before or, in older
    versions, after it its `rng_state`. The other ranks write theirs at any time.
    """
    state = files.get(_HF_STATE)
    if state is None or whole(_HF_STATE) is not True:
        return Evidence.LACKING
    if _sharded(files, ranks) < Evidence.UNKNOWN:
        return Evidence.LACKING
    others = [v.changed_ns for n, v in files.items() if not n.startswith("rng_state")]
    if state.changed_ns < max(others):
        return Evidence.LACKING
    if not any(_HF_RESUMABLE.match(name) for name in files):
        return Evidence.WHOLE  # save_only_model
    present = {int(m[1]) for name in files if (m := _HF_RANK.fullmatch(name))}
    return _all_ranks(present, ranks, alone="rng_state.pth" in files)


def _all_ranks(present: set[int], ranks: int | None, *, alone: bool) -> Evidence:
    if ranks is None or (alone and ranks > 1) or (present and ranks == 1):
        return Evidence.UNKNOWN  # the program counts its ranks in another way
    if alone or (present and present >= set(range(ranks))):
        return Evidence.WHOLE
    return Evidence.LACKING


def _accelerate(files: Mapping[str, FileVersion], ranks: int | None) -> Evidence:
    """Return how complete a directory of `Accelerator.save_state` is.

    Each rank's `random_states_N.pkl` follows what it has written before; registered objects
    (`custom_checkpoint_N.pkl`), of unknown number, follow that of rank 0.
    """
    present = {int(m[1]) for name in files if (m := _ACCELERATE_RANK.fullmatch(name))}
    return min(_all_ranks(present, ranks, alone=False), Evidence.UNKNOWN)


def _sharded(files: Mapping[str, FileVersion], ranks: int | None) -> Evidence:
    """Return how complete a distributed checkpoint of torch is; UNKNOWN without parts.

    The coordinator renames `.metadata` into place when all ranks have written their shards; of an
    overwritten checkpoint it is older than they are. Without collectives each rank has its own.
    """
    evidence = []
    for folder in {name.rpartition("/")[0] for name in files if name.endswith(_DCP_SUFFIX)}:
        prefix = f"{folder}/" if folder else ""
        shards = [
            version.changed_ns
            for name, version in files.items()
            if name.startswith(prefix) and name.endswith(_DCP_SUFFIX)
        ]
        index = files.get(prefix + _DCP_INDEX)
        if index is not None:
            late_ns = max(shards) - index.changed_ns
            late = Evidence.UNKNOWN if late_ns <= _CLOCK_NS else Evidence.LACKING
            evidence.append(Evidence.WHOLE if late_ns <= 0 else late)
            continue
        own = re.compile(re.escape(prefix) + r"__(\d+)\.metadata")
        present = {int(found[1]) for name in files if (found := own.fullmatch(name))}
        evidence.append(_all_ranks(present, ranks, alone=False) if present else Evidence.CUT)
    return min(evidence, default=Evidence.UNKNOWN)


def _is_index(name: str) -> bool:
    return name.rpartition("/")[2] == _DCP_INDEX


def _lightning(path: str, files: Mapping[str, FileVersion], whole: Whole) -> Evidence:
    """Return how complete Lightning's directory around a complete distributed checkpoint is.

    Lightning's sharded checkpoints are directories `*.ckpt`, whose `meta.pt` rank 0 writes last.
    """
    last = files.get(_LIGHTNING_LAST)
    rest = {n: v for n, v in files.items() if n != _LIGHTNING_LAST}
    only_shards = all(name.endswith((_DCP_SUFFIX, _DCP_INDEX)) and "/" not in name for name in rest)
    if last is None:
        if path.endswith(".ckpt"):
            return Evidence.LACKING
        return Evidence.WHOLE if only_shards else Evidence.UNKNOWN
    newest = max(version.changed_ns for version in rest.values())
    if last.changed_ns < newest:
        return Evidence.LACKING
    return Evidence.WHOLE if only_shards and whole(_LIGHTNING_LAST) else Evidence.UNKNOWN


def _deepspeed(
    path: str, files: Mapping[str, FileVersion], whole: Whole, ranks: int | None
) -> Evidence:
    """Return how complete a directory of DeepSpeed is: a tag's, or the one with `latest`.

    Rank 0 writes `latest` when its own part is written; it does not wait for the other ranks.
    """
    found = {name: m for name in files if (m := _DEEPSPEED.fullmatch(name))}
    tag = max(found.items(), key=lambda item: files[item[0]].changed_ns)[1]["tag"].rstrip("/")
    parent = path if tag else os.path.dirname(path)  # noqa: PTH120 - pathlib is slow to load
    named, changed_ns = _latest(f"{parent}/latest")
    own = [n for n, m in found.items() if m["tag"].rstrip("/") == tag]
    # The parts of other ranks may be newer than `latest`.
    if named != (tag or os.path.basename(path)):  # noqa: PTH119
        return Evidence.LACKING
    if changed_ns < min(files[name].changed_ns for name in own):
        return Evidence.LACKING  # `latest` of an earlier save of the same tag
    if ranks == 1:
        newest = max(files[name].changed_ns for name in own)
        return Evidence.WHOLE if changed_ns >= newest else Evidence.LACKING
    zero = [name for name in own if found[name]["zero"] and "optim" in found[name]["zero"]]
    if ranks is None or not zero:
        return Evidence.UNKNOWN
    if len(zero) < ranks:
        return Evidence.LACKING
    return Evidence.WHOLE if all(whole(name) for name in own) else Evidence.UNKNOWN


def _latest(path: str) -> tuple[str, int]:
    """Return the tag in DeepSpeed's `latest`, and when it was written; "", 0 if there is none."""
    try:
        with regular_file(path) as descriptor:
            text = os.read(descriptor, _MAX_TAG).decode("utf-8", "replace").strip()
            return text, os.fstat(descriptor).st_mtime_ns
    except OSError:
        return "", 0
