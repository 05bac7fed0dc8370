"""Search for a launcher in a command line.

Part of each start with a launcher: imports only modules that Python has loaded already.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.job.launchers.shell_text import SHELLS, WRAPPERS, base_name, text_index

_KEYWORDS = frozenset(("if", "then", "else", "elif", "while", "until", "do", "!"))
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    **dict.fromkeys(("composer", "composer.cli", "composer.cli.launcher"), "composer"),
    **{name: name for name in ("fastai.launch", "paddle.distributed.launch")},
}
_FILES = {
    "torchrun": "torchrun",
    "torch/distributed/run.py": "torchrun",
    "torch/distributed/launch.py": "torchrun",
    "accelerate-launch": "accelerate",
    "deepspeed": "deepspeed",
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun"), "mpirun"),
    **dict.fromkeys(("mpirun.openmpi", "mpiexec.openmpi", "mpirun.mpich", "ibrun"), "mpirun"),
    **{name: name for name in ("horovodrun", "srun", "composer")},
}
#: Launchers whose name is that of a command with subcommands.
_SUBCOMMANDS = {
    ("accelerate", "launch"): "accelerate",
    ("colossalai", "run"): "colossalai run",
    ("fabric", "run"): "fabric run",
    ("torchx", "run"): "torchx run",
    ("ray", "start"): "ray start",
    ("vllm", "serve"): "vllm serve",
}
#: Those of them that serve by one process for all GPUs of a node, and so are no training.
SERVICES = frozenset(("ray start", "vllm serve"))
_INTERPRETERS = ("python", "pypy")


class LauncherSite:
    """Launcher in a list of words: its kind, and the index of its first option."""

    __slots__ = ("first", "kind")

    def __init__(self, kind: str, first: int) -> None:
        self.kind, self.first = kind, first


def recognise(program: Sequence[str]) -> str | None:
    """Return the name of the launcher that a command line starts; None without one."""
    words = list(program)
    text_at = text_index(words)
    if text_at is None:
        site = find(words)
        return site.kind if site else None
    from slurm_elastic.job.launchers.shell_commands import (  # noqa: PLC0415 - slow to load
        simple_commands,
        unquoted,
    )

    sites = [find([unquoted(word) for word, _, _ in c]) for c in simple_commands(words[text_at])]
    return next((site.kind for site in sites if site), None)


def is_python(name: str) -> bool:
    """Return whether the last component of a path is that of a Python interpreter."""
    return name.rstrip("0123456789.") in _INTERPRETERS


def _is_assignment(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and name.isidentifier()


def find(words: Sequence[str]) -> LauncherSite | None:
    """Return the launcher that a command starts, directly or through `WRAPPERS`."""
    start = 0
    while start < len(words) and (_is_assignment(words[start]) or words[start] in _KEYWORDS):
        start += 1
    for index in range(start, len(words)):
        site = _launcher_at(words, index)
        if site is not None:
            return site
        name = base_name(words[index])
        if is_python(name) or name in SHELLS or name.endswith((".py", ".sh")):
            return None
        if index == start and name not in WRAPPERS:
            return None
    return None


def _launcher_at(words: Sequence[str], index: int) -> LauncherSite | None:
    name = base_name(words[index])
    kind = _FILES.get(name)
    if kind is not None:
        return LauncherSite(kind, index + 1)
    following = words[index + 1] if index + 1 < len(words) else ""
    kind = _SUBCOMMANDS.get((name, following))
    if kind is not None:
        return LauncherSite(kind, index + 2)
    return _after_python(words, index + 1) if is_python(name) else None


def _after_python(words: Sequence[str], index: int) -> LauncherSite | None:
    """Return the launcher that an interpreter runs as a module or file."""
    while index + 1 < len(words) and words[index].startswith("-"):
        option = words[index]
        if option.startswith("-m") and len(option) > 2:
            kind = _MODULES.get(option[2:])
            return LauncherSite(kind, index + 1) if kind else None
        if not option.startswith("--") and option.endswith("m"):
            module = words[index + 1]
            if module == "accelerate" and words[index + 2 : index + 3] == ["launch"]:
                return LauncherSite("accelerate", index + 3)
            kind = _MODULES.get(module)
            return LauncherSite(kind, index + 2) if kind else None
        if not option.startswith("--") and option.endswith("c"):
            return None
        index += 2 if option in ("-X", "-W") else 1
    if index >= len(words):
        return None
    path = words[index]
    kind = _FILES.get("/".join(path.split("/")[-3:])) or _FILES.get(base_name(path))
    if kind is not None:
        return LauncherSite(kind, index + 1)
    return _launcher_at(words, index) if base_name(path) == "accelerate" else None
