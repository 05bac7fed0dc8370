"""Sentences of `core.reasons.launcher_codes`."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.cli.sentences.phrases import Parameters, Sentence, counted, duration


def _companion(p: Parameters) -> str:
    return "a companion" if p["job"] is None else f"companion {p['job']}"


def _disconnected(p: Parameters) -> str:
    why = f": {p['error']}" if p["error"] else ""
    return f"{_companion(p)} has lost its connection to esrun{why}"


SENTENCES: Mapping[str, Sentence] = {
    "members-fixed": "the training cannot change its members now",
    "members-cancelled": "the controller has cancelled it",
    "members-ended": "the program has ended",
    "companions-too-many": lambda p: f"more than {counted(p['most'], 'companion')}",
    "sbatch-failed": "sbatch: {error}",
    "sbatch-unanswered": lambda p: f"sbatch has not answered in {duration(p['waited_s'])}",
    "companion-late": lambda p: f"{_companion(p)} has not joined by the deadline",
    "companion-not-running": lambda p: f"{_companion(p)} does not run",
    "companion-cancelled": lambda p: f"the controller has cancelled {_companion(p)}",
    "companion-fixed": lambda p: (
        f"{_companion(p)} runs, but the training cannot change its members any more"
    ),
    "companion-size-differs": lambda p: f"{_companion(p)} has {p['gpus']} GPUs, not {p['ordered']}",
    "companion-start-failed": lambda p: f"the ranks of {_companion(p)}: srun: {p['error']}",
    "companion-exited": lambda p: (
        f"the ranks of {_companion(p)} ended with exit code {p['exit_code']}"
    ),
    "companion-out-of-memory": lambda p: (
        f"the ranks of {_companion(p)} ran out of memory on {counted(p['gpus'], 'GPU')}"
    ),
    "companion-killed": lambda p: f"the ranks of {_companion(p)} were killed",
    "companion-terminated": lambda p: f"Slurm ended {_companion(p)}",
    "companion-disconnected": _disconnected,
    "companion-dropped": lambda p: f"rank 0 has lost {_companion(p)}",
}
