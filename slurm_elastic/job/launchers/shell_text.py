"""Shell text in a command line (`bash -c TEXT`).

Part of each start with a launcher: imports only modules that Python has loaded already.
"""

from __future__ import annotations

from collections.abc import Sequence

SHELLS = frozenset(("sh", "bash", "dash", "ksh", "mksh", "zsh", "csh", "tcsh", "fish"))
#: Commands that run the command in their arguments.
WRAPPERS = frozenset(
    """
    apptainer catchsegv ch-run chrt command conda docker enroot env exec hatch ionice mamba
    micromamba ncu nice nohup nsys numactl pdm pipenv pixi podman podman-hpc poetry pyenv sarus
    setsid shifter singularity stdbuf taskset time timeout uv uvx xvfb-run
    """.split()  # noqa: SIM905 - more readable than quoted names
)


def text_index(words: Sequence[str]) -> int | None:
    """Return the index of the text that a shell runs (`bash -c TEXT`); None without one."""
    for index, word in enumerate(words):
        name = base_name(word)
        if name in SHELLS:
            return _after_shell(words, index + 1)
        if index == 0 and name not in WRAPPERS:
            return None
    return None


def _after_shell(words: Sequence[str], index: int) -> int | None:
    while index < len(words) and words[index][:1] in ("-", "+"):
        option = words[index]
        if not option.startswith("--") and "c" in option:
            return index + 1 if index + 1 < len(words) else None
        index += 2 if option in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file") else 1
    return None


def base_name(path: str) -> str:
    """Return the last component of a path."""
    return path.rstrip("/").rpartition("/")[2]
