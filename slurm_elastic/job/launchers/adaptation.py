"""Adaptation of a command line with a launcher to the present shape of the job.

A launcher starts the ranks of a node itself. One per GPU would start as many trainings side by
side, so it is either started once per node, with the job's shape in place of the user's options
for it, or refused with the command line to write instead.

Imported only for command lines that contain the name of a launcher. The ranks wait for it, so it
imports only modules that Python has loaded already, and others where they are needed.

>>> adapt(["torchrun", "--standalone", "--nproc_per_node=8", "train.py"], WorldShape(1, 2)).program
['torchrun', '--nnodes=1', '--nproc_per_node=$ESRUN_LOCAL_RANKS', '--node_rank=$ESRUN_NODE_RANK', \
'--rdzv_backend=static', '--rdzv_id=$SLURM_ELASTIC_RUN_ID', '--master_addr=$MASTER_ADDR', \
'--master_port=$MASTER_PORT', 'train.py']
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.job.launchers.launcher_site import SERVICES, LauncherSite, find, is_python
from slurm_elastic.job.launchers.shell_text import base_name, text_index

#: Variables in options that `adapt` inserts.
VARIABLES = frozenset(
    (
        *("ESRUN_LOCAL_RANKS", "ESRUN_NODE_RANK", "ESRUN_NUM_PROCESSES", "SLURM_ELASTIC_RUN_ID"),
        *("MASTER_ADDR", "MASTER_PORT", "ESRUN_RENDEZVOUS"),
    )
)


class LauncherError(SlurmElasticError):
    """A launcher that cannot be started once per node; the message is one line."""


class WorldShape:
    """Ranks to start.

    Attributes:
        nodes: number of nodes that run ranks.
        ranks: number of ranks on all nodes.
        without_libuv: whether the system's torch is built without it, as Debian's.
    """

    __slots__ = ("nodes", "ranks", "without_libuv")

    def __init__(self, nodes: int, ranks: int, *, without_libuv: bool = False) -> None:
        self.nodes, self.ranks, self.without_libuv = nodes, ranks, without_libuv


class AdaptedProgram:
    """A command line with a launcher, changed for the present shape of the job.

    Attributes:
        name: of the launcher.
        program: command line; `$ESRUN_…` and `$MASTER_…` are replaced on each node.
        per_node: whether it is started once per node; else once per rank.
    """

    __slots__ = ("name", "per_node", "program")

    def __init__(self, *, name: str, program: list[str], per_node: bool) -> None:
        self.name, self.program, self.per_node = name, program, per_node


class _Grammar:
    """Options of a launcher.

    Attributes:
        flags: without a value.
        replaced: options that describe the shape of the job.
    """

    __slots__ = ("flags", "replaced")

    def __init__(self, *, flags: frozenset[str], replaced: frozenset[str]) -> None:
        self.flags, self.replaced = flags, replaced

    def replacing(self, name: str) -> _Grammar:
        """Return the same options, one more of which describes the shape of the job."""
        return _Grammar(flags=self.flags, replaced=self.replaced | {name})


class _Edit:
    """Change of a launcher's options: indices to leave out, and words to insert at `at`."""

    __slots__ = ("at", "dropped", "inserted", "per_node")

    def __init__(
        self, at: int, dropped: frozenset[int], inserted: tuple[str, ...], *, per_node: bool = True
    ) -> None:
        self.at, self.dropped, self.inserted, self.per_node = at, dropped, inserted, per_node


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TORCHRUN = _Grammar(
    flags=_names(
        "standalone m module no_python run_path virtual_local_rank use_env use-env h help"
    ),
    replaced=_names(
        "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id standalone"
        " master_addr master_port"
    ),
)
_TORCHRUN_BY_FILE = _TORCHRUN.replacing("rdzv_conf")
_ACCELERATE = _Grammar(
    flags=_names(
        "q quiet m module no_python debug cpu multi_gpu tpu use_deepspeed use_fsdp"
        " use_megatron_lm use_parallelism_config same_network tpu_cluster tpu_use_cluster"
        " no_tpu_cluster tpu_use_sudo use_xpu use_mps_device downcast_bf16 enable_cpu_affinity"
        " dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation h help"
    ),
    replaced=_names(
        "num_processes num_machines machine_rank main_process_ip main_process_port same_network"
        " multi_gpu rdzv_backend gpu_ids deepspeed_multinode_launcher"
    ),
)
_ACCELERATE_BY_FILE = _ACCELERATE.replacing("rdzv_conf")
_DEEPSPEED = _Grammar(
    flags=_names(
        "module no_python no_local_rank no_ssh no_ssh_check force_multi save_pid"
        " bind_cores_to_rank q quiet h help"
    ),
    replaced=frozenset(),
)
_PROGRAMS = frozenset(("torchrun", "accelerate", "accelerate-launch"))
_SITE_PACKAGES = "site-packages/torch"
#: Kinds of `accelerate launch` that start their processes by torchrun without `--multi_gpu`.
_ACCELERATE_ENGINES = {
    "FSDP": "use_fsdp",
    "DEEPSPEED": "use_deepspeed",
    "MEGATRON_LM": "use_megatron_lm",
}


def adapt(program: Sequence[str], shape: WorldShape) -> AdaptedProgram | None:
    """Return the command line to start in place of one with a launcher; None without one.

    Args:
        program: the user's command line.
        shape: of the ranks to start.

    Raises:
        LauncherError: it cannot be started once per node.
    """
    words = list(program)
    text_at = text_index(words)
    if text_at is not None:
        return _adapt_text(words, text_at, shape)
    site = find(words)
    if site is None or _may_run(site, shape):
        return None
    edit = _edit(words, site, shape)
    kept = [word for i, word in enumerate(words) if i >= edit.at and i not in edit.dropped]
    adapted = [*words[: edit.at], *edit.inserted, *kept]
    return AdaptedProgram(name=site.kind, program=adapted, per_node=edit.per_node)


def expand(program: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return an adapted command line with the variables in its options replaced.

    In a job each node does it (`srun.LAUNCHER_SCRIPT`); in shell text the shell does.
    """
    expanded, names = [], set(VARIABLES)
    for word in program:
        option, _, name = word.partition("=$")
        if option.startswith("--") and name in names:
            names.remove(name)
            word = f"{option}={values[name]}"  # noqa: PLW2901 - the same word
        expanded.append(word)
    return expanded


def _edit(words: Sequence[str], site: LauncherSite, shape: WorldShape) -> _Edit:
    if site.kind == "torchrun":
        if _by_file(words, site, shape):
            dropped, values, _ = _options(words, site.first, _TORCHRUN_BY_FILE)
            return _Edit(site.first, dropped, _file_options(shape, values.get("rdzv_conf", "")))
        dropped, _, _ = _options(words, site.first, _TORCHRUN)
        return _Edit(site.first, dropped, _torchrun_options(shape))
    if site.kind == "accelerate":
        return _accelerate(words, site, shape)
    if site.kind in SERVICES:
        raise LauncherError(
            f"{site.kind}: is invalid here: esrun would start it {shape.ranks} times, once for each"
            " GPU; start it without esrun and without --elastic, as it is not resized"
        )
    import shlex  # noqa: PLC0415 - slow to load

    remedy = "python train.py"
    if site.kind == "deepspeed":
        _, _, script = _options(words, site.first, _DEEPSPEED)
        remedy = shlex.join(["python", *words[script:]])
    raise LauncherError(
        f"{site.kind}: is invalid here: expected torchrun, accelerate launch, or the program"
        f" itself, of which esrun starts all ranks; write: esrun {remedy}"
    )


def _may_run(site: LauncherSite, shape: WorldShape) -> bool:
    """Return whether it is started as it is: a service, once."""
    return site.kind in SERVICES and shape.ranks == 1


def _torchrun_options(shape: WorldShape) -> tuple[str, ...]:
    return (
        f"--nnodes={shape.nodes}",
        "--nproc_per_node=$ESRUN_LOCAL_RANKS",
        "--node_rank=$ESRUN_NODE_RANK",
        "--rdzv_backend=static",
        "--rdzv_id=$SLURM_ELASTIC_RUN_ID",
        "--master_addr=$MASTER_ADDR",
        "--master_port=$MASTER_PORT",
    )


def _file_options(shape: WorldShape, settings: str) -> tuple[str, ...]:
    """Return options for a rendezvous by a file: that by TCP needs libuv in torch's launcher."""
    options = (
        f"--nnodes={shape.nodes}",
        "--nproc_per_node=$ESRUN_LOCAL_RANKS",
        "--rdzv_backend=c10d",
        "--rdzv_id=$SLURM_ELASTIC_RUN_ID",
        _file_settings(settings),
    )
    # Without a path torch creates a temporary file, which is enough for one node.
    return (*options, "--rdzv_endpoint=$ESRUN_RENDEZVOUS") if shape.nodes > 1 else options


def _file_settings(settings: str) -> str:
    return f"--rdzv_conf={','.join(filter(None, ('store_type=file', settings)))}"


def _by_file(words: Sequence[str], site: LauncherSite, shape: WorldShape) -> bool:
    """Return whether the nodes have to meet by a file: the launcher's torch has no libuv."""
    return shape.without_libuv and not _has_own_torch(words[: site.first])


def _has_own_torch(words: Sequence[str]) -> bool:
    """Return whether a launcher is installed in an environment that has a torch of its own."""
    names = [word for word in words if base_name(word) in _PROGRAMS or is_python(base_name(word))]
    path = _executable(names[0]) if names else None
    if path is None:
        return False
    libraries = f"{path.rpartition('/')[0]}/../lib"
    try:
        folders = os.listdir(libraries)  # noqa: PTH208 - pathlib is slow to load
    except OSError:
        return False
    versions = (name for name in folders if name.startswith("python"))
    return any(os.path.isdir(f"{libraries}/{name}/{_SITE_PACKAGES}") for name in versions)  # noqa: PTH112


def _executable(name: str) -> str | None:
    """Return the path of a command, as the shell finds it; `shutil` is slow to load."""
    folders = [""] if "/" in name else os.get_exec_path()
    paths = (f"{folder}/{name}" if folder else name for folder in folders)
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _accelerate(words: Sequence[str], site: LauncherSite, shape: WorldShape) -> _Edit:
    by_file = _by_file(words, site, shape)
    grammar = _ACCELERATE_BY_FILE if by_file else _ACCELERATE
    dropped, values, _ = _options(words, site.first, grammar)
    if "cpu" in values or shape.ranks == 1:
        # It starts one process, which takes its rank from the environment.
        alone = ["--num_processes=1", "--num_machines=1", "--main_process_port=0", "--gpu_ids=all"]
        if by_file:
            alone += ["--rdzv_backend=c10d", _file_settings(values.get("rdzv_conf", ""))]
        return _Edit(site.first, dropped, tuple(alone), per_node=False)
    engine = next((name for name in _ACCELERATE_ENGINES.values() if name in values), None)
    if engine is None:
        from slurm_elastic.job.launchers.accelerate_config import (  # noqa: PLC0415 - slow to load
            distributed_type,
        )

        engine = _ACCELERATE_ENGINES.get(distributed_type(values.get("config_file")))
    inserted = ["--multi_gpu"] if engine is None else []
    inserted += [
        # accelerate divides by the nodes, which so may have different numbers of GPUs.
        "--num_processes=$ESRUN_NUM_PROCESSES",
        f"--num_machines={shape.nodes}",
        "--machine_rank=$ESRUN_NODE_RANK",
        "--main_process_port=$MASTER_PORT",
        "--gpu_ids=all",
    ]
    if by_file:
        # accelerate makes the path of the file from this address, if there are several nodes.
        settings = _file_settings(values.get("rdzv_conf", ""))
        inserted += ["--main_process_ip=$ESRUN_RENDEZVOUS", "--rdzv_backend=c10d", settings]
    else:
        inserted += ["--main_process_ip=$MASTER_ADDR", "--same_network", "--rdzv_backend=static"]
    if engine == "use_deepspeed":
        inserted.append("--deepspeed_multinode_launcher=standard")
    return _Edit(site.first, dropped, tuple(inserted))


def _options(
    words: Sequence[str], first: int, grammar: _Grammar
) -> tuple[frozenset[int], dict[str, str], int]:
    """Read a launcher's options, with argparse's abbreviations.

    Returns:
        Indices of those that describe the shape, the values of all, and the index of the script.
    """
    dropped: set[int] = set()
    values: dict[str, str] = {}
    index = first
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        name, equals, value = words[index].partition("=")
        key = name.lstrip("-").replace("-", "_")
        is_long = name.startswith("--")
        is_flag = key in grammar.flags or (not is_long and len(key) > 1)
        width = 1 if equals or is_flag else 2
        following = words[index + 1] if index + 1 < len(words) else ""
        values[key] = value if equals else "" if is_flag else following
        if is_long and any(full.startswith(key) for full in grammar.replaced):
            dropped.update(range(index, index + width))
        index += width
    return frozenset(dropped), values, min(index, len(words))


def _adapt_text(words: list[str], index: int, shape: WorldShape) -> AdaptedProgram | None:
    from slurm_elastic.job.launchers.shell_commands import (  # noqa: PLC0415 - slow to load
        simple_commands,
        unquoted,
    )

    text, name, per_node = words[index], "", False
    for command in reversed(simple_commands(text)):  # from the end, so that places stay valid
        values = [unquoted(word) for word, _, _ in command]
        site = find(values)
        if site is None or _may_run(site, shape):
            continue
        edit = _edit(values, site, shape)
        name, per_node = site.kind, edit.per_node or per_node
        for dropped in sorted(edit.dropped & frozenset(range(len(command))), reverse=True):
            _, start, end = command[dropped]
            text = text[:start].rstrip(" \t") + text[end:]
        at = command[edit.at - 1][2]
        # Of the values only a path may contain a space.
        inserted = [f'"{word}"' if "RENDEZVOUS" in word else word for word in edit.inserted]
        text = f"{text[:at]} {' '.join(inserted)}{text[at:]}"
    if not name:
        return None
    adapted = [*words[:index], text, *words[index + 1 :]]
    return AdaptedProgram(name=name, program=adapted, per_node=per_node)
