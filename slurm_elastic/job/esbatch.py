"""esbatch: sbatch for elastic jobs on sites without the SPANK plugin.

Takes `--elastic=…` from the command line, else from SLURM_ELASTIC, else from the script's
`#SBATCH` lines, and calls sbatch with options of Slurm: `--comment=elastic:…`, `--requeue`,
`--open-mode=append` and, if the job names no GPUs, a shape to start in. All other options, the
script's arguments and sbatch's exit code are passed on. Option names must be written in full.
`--advise` (also for jobs that are not elastic) says on standard error how long such jobs took, and
which limit would do; the job is submitted in any case.

    >>> words = ["--elastic=2-16", "--time=60", "train.sbatch", "--lr", "1"]
    >>> command, elastic = plan(words, "", {}, lambda partition: {"a100": 4})
    >>> command[:4]
    ['--time=60', '--comment=elastic:2-16', '--requeue', '--open-mode=append']
    >>> command[4:]
    ['--nodes=1', '--gres=gpu:2', 'train.sbatch', '--lr', '1']

Standard library only; runs on login nodes.
"""

import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.directive_grammar import is_slice
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.job.launchers.launcher_site import SERVICES, find
from slurm_elastic.job.launchers.shell_commands import simple_commands, unquoted

ENVIRONMENT = "SLURM_ELASTIC"
#: Longest comment Slurm accepts, in bytes.
MAX_COMMENT_BYTES = 1024
#: Longest script sbatch accepts by default, in bytes.
MAX_SCRIPT_BYTES = 4 * 1024 * 1024
#: GPUs per node if sinfo prints none.
DEFAULT_GPUS_PER_NODE = 4

#: Beginning of a script in which launchers are searched for.
_SEARCHED_CHARACTERS = 65536
#: Launchers that esrun starts itself.
_ADAPTED = frozenset(("torchrun", "accelerate"))
_WORD = re.compile(r"[\w-]+")
#: sbatch's options that take no value, or only one joined by "=".
_FLAGS = frozenset(
    _WORD.findall("""
        advise contiguous exclusive get-user-env help hold ignore-pbs nice no-kill no-requeue
        oom-kill-step overcommit oversubscribe parsable propagate quiet reboot requeue resv-ports
        share spread-job stepmgr test-only usage use-min-nodes verbose version wait
    """)
)
_SHORT_FLAGS = "HhkOQsvVW"
_SHORT_NAMES = {"C": "constraint", "G": "gpus", "N": "nodes", "p": "partition"}
_INFORMATION = frozenset(["-h", "--help", "--usage", "-V", "--version"])
_SHAPE = frozenset(
    _WORD.findall("gres gpus gpus-per-node gpus-per-socket gpus-per-task ntasks-per-gpu")
)
_SHAPE_VARIABLES = frozenset("SBATCH_" + name.upper().replace("-", "_") for name in _SHAPE)
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_IN_SCRIPT = re.compile(r"""\s--elastic(?:=|\s+)(?:"[^"]*"|'[^']*'|\S*)""")


class EsbatchError(SlurmElasticError):
    """A request that cannot be submitted; the message is one line."""


class Option(NamedTuple):
    """One option as given: its long name ("-x" if esbatch does not use it) and value."""

    name: str
    value: str
    words: tuple[str, ...]


def parse_options(arguments: Sequence[str]) -> tuple[list[Option], list[str]]:
    """Split sbatch's arguments into its options and the rest: script and script arguments."""
    options: list[Option] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        following = arguments[index + 1 : index + 2]
        if argument == "--":
            return options, list(arguments[index:])
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            if not equals and name not in _FLAGS:
                value = "".join(following)
                options.append(Option(name, value, (argument, *following)))
                index += 1 + len(following)
                continue
            options.append(Option(name, value, (argument,)))
        elif argument.startswith("-") and argument != "-":
            letters = argument[1:].lstrip(_SHORT_FLAGS)
            name = _SHORT_NAMES.get(letters[:1], f"-{letters[:1]}")
            value_words = following if len(letters) == 1 else []
            options.append(
                Option(name, letters[1:] or "".join(value_words), (argument, *value_words))
            )
            index += len(value_words)
        else:
            return options, list(arguments[index:])
        index += 1
    return options, []


def script_options(script: str) -> list[Option]:
    """Return the options in a script's `#SBATCH` lines, up to its first command."""
    options: list[Option] = []
    for line in _header_lines(script):
        if line.startswith("#SBATCH"):
            try:
                arguments = shlex.split(line[len("#SBATCH") :], comments=True)
            except ValueError as error:
                raise EsbatchError(f"{line.strip()}: {error}") from None
            if arguments[:1] in (["hetjob"], ["packjob"]):
                raise EsbatchError("heterogeneous jobs cannot be resized: leave out --elastic")
            options += parse_options(arguments)[0]
    return options


def without_elastic(script: str) -> str:
    """Return the script without `--elastic`; its lines keep their numbers."""
    lines = _LINE.findall(script)
    for number, line in enumerate(_header_lines(script)):
        if line.startswith("#SBATCH") and _IN_SCRIPT.search(line):
            stripped = _IN_SCRIPT.sub("", line)
            lines[number] = stripped if stripped.strip() != "#SBATCH" else f"#{line}"
    return "".join(lines)


def plan(
    arguments: Sequence[str],
    script: str,
    environment: Mapping[str, str],
    cluster: Callable[[str], Mapping[str, int]],
) -> tuple[list[str], bool]:
    """Return the arguments for sbatch.

    Args:
        arguments: The user's arguments, as for sbatch.
        script: The text of the script; empty with --wrap.
        environment: The user's environment.
        cluster: Returns, for a partition or "", the GPUs of the smallest node of each GPU type (""
            for GPUs without a type). Called only if the job needs a shape to start in.

    Returns:
        sbatch's arguments and whether the job is elastic.

    Raises:
        EsbatchError: The request cannot be submitted.
        DirectiveError: The directive does not follow the grammar.
    """
    options, script_and_arguments = parse_options(arguments)
    in_script = script_options(script)
    text = _elastic(options, in_script, environment)
    if text is None:
        return list(arguments), False
    directive = Directive.parse(text)
    if ":" in script_and_arguments:
        raise EsbatchError("heterogeneous jobs cannot be resized: leave out --elastic")
    values = {option.name: option.value for option in (*in_script, *options)}
    if "no-requeue" in values:
        raise EsbatchError("an elastic job is resized by requeueing it: leave out --no-requeue")
    command = [
        word
        for option in options
        if option.name not in {"elastic", "comment", "requeue"}
        for word in option.words
    ]
    command += [f"--comment={_comment(directive, values.get('comment', ''))}", "--requeue"]
    if "open-mode" not in values and "SBATCH_OPEN_MODE" not in environment:
        command.append("--open-mode=append")
    has_shape = _SHAPE & values.keys() or _SHAPE_VARIABLES & environment.keys()
    if not has_shape and "gpu" not in values.get("tres-per-task", ""):
        partition = values.get("partition") or environment.get("SBATCH_PARTITION", "")
        command += start_options(
            directive,
            cluster(partition),
            nodes_given="nodes" in values,
            constrained="constraint" in values,
        )
    return command + script_and_arguments, True


def start_options(
    directive: Directive,
    gpus_per_node: Mapping[str, int],
    *,
    nodes_given: bool,
    constrained: bool,
) -> list[str]:
    """Return options that start a job at its smallest size on GPUs of one type.

    With a constraint to features and no types in the directive, no type is requested.

    Raises:
        EsbatchError: the partition has slices of GPUs and no whole one.
    """
    if gpus_per_node and all(map(is_slice, gpus_per_node)):
        raise EsbatchError(
            f"the partition has slices of GPUs (MIG: {min(gpus_per_node)}) and no whole ones, and"
            " slices cannot be resized: name another partition or leave out --elastic"
        )
    gpus, gpu_type = directive.start()
    ranked = sorted(gpus_per_node, key=lambda name: (-gpus_per_node[name], name))
    known_types = [name for name in directive.types or ranked if name in gpus_per_node]
    types = [name for name in known_types or directive.types if directive.allows(gpus, name)]
    smallest = min((gpus_per_node.get(name, DEFAULT_GPUS_PER_NODE) for name in types), default=0)
    may_mix_types = len(gpus_per_node) > 1 and (
        nodes_given or gpus > (smallest or DEFAULT_GPUS_PER_NODE)
    )
    has_other_types = set(gpus_per_node) - set(types) or (directive.types and not gpus_per_node)
    by_features = constrained and not directive.types
    if gpu_type is None and types and not by_features and (may_mix_types or has_other_types):
        gpu_type = types[0] or None
    kind = f"{gpu_type}:" if gpu_type else ""
    if nodes_given:
        return [f"--gpus={kind}{gpus}"]
    size = gpus_per_node.get(gpu_type or "", smallest) or DEFAULT_GPUS_PER_NODE
    nodes = math.ceil(gpus / size)
    if gpus % nodes:
        return [f"--nodes={nodes}", f"--gpus={kind}{gpus}"]
    return [f"--nodes={nodes}", f"--gres=gpu:{kind}{gpus // nodes}"]


def foreign_launcher(script: str) -> str | None:
    """Return the launcher that a batch script starts, if it does not use esrun; else None."""
    if "esrun" in script:
        return None
    text = script[:_SEARCHED_CHARACTERS]
    commands = ([unquoted(word) for word, _, _ in command] for command in simple_commands(text))
    return next((site.kind for site in map(find, commands) if site), None)


def read_sinfo(report: str) -> dict[str, int]:
    """Return the GPUs of the smallest node of each type, from `sinfo -h -o "%P %G"`.

    Of several partitions only the default one, marked by an asterisk, is used.
    """
    lines = [line.partition(" ")[::2] for line in report.splitlines()]
    default = [line for line in lines if line[0].endswith("*")]
    sizes: dict[str, int] = {}
    for _, gres in default or lines:
        for name, count in re.findall(r"(?:^|,)gpu:(?:([^:(,\s]+):)?(\d+)", gres):
            sizes[name] = min(sizes.get(name, int(count)), int(count))
    return sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run esbatch and return its exit code."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _submit(command_line)
    except (SlurmElasticError, OSError) as error:
        sys.stderr.write(f"esbatch: error: elastic: {error}\n")
        return 1


def _submit(arguments: list[str]) -> int:
    options, script_and_arguments = parse_options(arguments)
    wants_advice = any(option.name == "advise" for option in options)
    if wants_advice:
        options = [option for option in options if option.name != "advise"]
        arguments = [word for o in options for word in o.words] + script_and_arguments
    if any(word in _INFORMATION for option in options for word in option.words):
        return _sbatch(arguments, None)
    name = next((word for word in script_and_arguments if word != "--"), None)
    stdin = name is None and not any(option.name == "wrap" for option in options)
    data = b""
    if stdin:
        data = sys.stdin.buffer.read(MAX_SCRIPT_BYTES + 1)
    elif name is not None and Path(name).is_file():
        data = Path(name).read_bytes()
    if len(data) > MAX_SCRIPT_BYTES:
        raise EsbatchError(f"the script is too large: expected at most {MAX_SCRIPT_BYTES} bytes")
    script = data.decode("utf-8", "surrogateescape")
    command, elastic = plan(arguments, script, os.environ, _cluster)
    if wants_advice:
        _advise(command, script, name)
    changed = data
    launcher = foreign_launcher(script) if elastic else None
    if launcher:
        place = "before" if launcher in _ADAPTED else "in the place of"
        remedy = (
            "leave out --elastic" if launcher in SERVICES else f"write esrun {place} {launcher}"
        )
        sys.stderr.write(
            f"esbatch: the script starts {launcher} without esrun, so the job will not be resized;"
            f" {remedy}\n"
        )
    if elastic:
        changed = without_elastic(script).encode("utf-8", "surrogateescape")
    if name is None or changed == data:
        return _sbatch(command, changed if stdin else None)
    with tempfile.TemporaryDirectory(prefix="esbatch-") as directory:
        copy = Path(directory) / Path(name).name  # the job's name by default
        copy.write_bytes(changed)
        command[len(command) - len(script_and_arguments) + script_and_arguments.index(name)] = str(
            copy
        )
        return _sbatch(command, None)


def _advise(command: Sequence[str], script: str, name: str | None) -> None:
    """Print what the controller says about the run time of the job."""
    from slurm_elastic.job import limit_request  # noqa: PLC0415 - for this option only
    from slurm_elastic.rpc import frames  # noqa: PLC0415

    values = {option.name: option.value for option in script_options(script)}
    values |= {option.name: option.value for option in parse_options(command)[0]}
    try:
        address = frames.controller_address()
    except frames.ChannelError as error:
        text = f"no advice: {error}"
    else:
        text = "no advice: no controller is configured here"
        if address:
            text = limit_request.advice(address, values, name)
    printable = "".join(c if c.isprintable() else "?" for c in text)
    sys.stderr.write(f"esbatch: advice: {printable}\n")


def _sbatch(command: list[str], stdin: bytes | None) -> int:
    code = subprocess.run(["sbatch", *command], input=stdin, check=False).returncode
    return code if code >= 0 else 128 - code


def _cluster(partition: str) -> dict[str, int]:
    filters = ["-p", partition] if partition else []
    try:
        process = subprocess.run(
            ["sinfo", "-h", *filters, "-o", "%P %G"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return read_sinfo(process.stdout)


def _elastic(
    options: list[Option], in_script: list[Option], environment: Mapping[str, str]
) -> str | None:
    """Return the directive by sbatch's precedence: command line, environment, script."""
    on_command_line = [option.value for option in options if option.name == "elastic"]
    if on_command_line:
        return on_command_line[-1]
    if environment.get(ENVIRONMENT):
        return environment[ENVIRONMENT]
    directives = [option.value for option in in_script if option.name == "elastic"]
    for directive in directives[1:]:
        if directive != directives[0]:
            raise EsbatchError(
                f"--elastic={directive}: differs from --elastic={directives[0]} given"
                " before; keep one"
            )
    return directives[0] if directives else None


def _comment(directive: Directive, own: str) -> str:
    """Return the directive followed by the user's own comment."""
    if own.startswith("elastic:"):
        raise EsbatchError(f"--comment={own}: the directive is given twice; keep --elastic")
    text = f"elastic:{directive} {own}".rstrip()
    size = len(text.encode("utf-8", "surrogateescape"))
    if size > MAX_COMMENT_BYTES:
        raise EsbatchError(
            f"--comment is {size - MAX_COMMENT_BYTES} bytes too long: it also holds the directive"
        )
    return text


def _header_lines(script: str) -> list[str]:
    """Return the lines that sbatch reads: all before the first command."""
    lines = []
    for line in _LINE.findall(script):
        if line.strip() and not line.startswith("#"):
            break
        lines.append(line)
    return lines
