"""Texts from users, files and commands: a parser accepts one or refuses it with a message."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.cli import formatting
from slurm_elastic.config import documentation, schema
from slurm_elastic.controller import listening_thread
from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.layout import LayoutText, LayoutTextError
from slurm_elastic.core.nodelist import expand, fold
from slurm_elastic.core.submission import SubmissionError, parse_admin_comment, parse_comment
from slurm_elastic.rpc import frames
from slurm_elastic.slurm import gres, limits, slurm_settings, switches
from tests.fuzz import checked_log, inputs
from tests.fuzz.tally import Tally, drive


class Parser(NamedTuple):
    """One parser.

    Attributes:
        read: called with the text.
        refuses: what it may raise.
        seeds: valid texts.
    """

    read: Callable[[str], Any]
    refuses: tuple[type[Exception], ...]
    seeds: tuple[str, ...]


def _directive(text: str) -> None:
    directive = Directive.parse(text)
    assert Directive.parse(str(directive)) == directive, "its canonical form means something else"


def _layout(text: str) -> None:
    layout = LayoutText.parse(text)
    assert LayoutText.parse(str(layout)) == layout, "its canonical form means something else"


def _nodes(text: str) -> None:
    names = expand(text)
    assert len(names) <= 70_000, "memory is not bounded"
    fold(names)


def _time(text: str) -> None:
    formatting.parse_time(text, 1.8e9)


_TOML = documentation.example()
_RECORD = (
    '{"at":1764000000,"elastic":"2-16","other":"x","shape":{"req_nodes":"g01","time_limit":60,'
    '"min_nodes":1,"tres_per_node":"gres/gpu:2","features":"a100","nice":0},"v":1}'
)
_TOPOLOGY = (
    "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=g[01-02]\n"
    "SwitchName=top Level=1 LinkSpeed=1 Nodes=g[01-04] Switches=leaf[1-2]\n"
    "BlockName=b1 BlockIndex=0 Nodes=g[1-2] BlockSize=2\nAggregatedBlock=b[1-2] Nodes=g[1-4]\n"
)
PARSERS = {
    "directive": Parser(_directive, (DirectiveError,), ("2-16,types=a100:v100,unit=a100:2/v100:8",
        "8,freeze=auto,parallel=hybrid,max-penalty=0.5%,notice=60,batch=256-4096",)),
    "layout": Parser(_layout, (LayoutTextError,), ("4x2", "2x3x2", "1-2-1")),
    "nodelist": Parser(_nodes, (ValueError,), ("g[01-03,07],login", "r[1-2]n[1-2]")),
    "admin comment": Parser(parse_admin_comment, (SubmissionError,), (_RECORD,)),
    "comment": Parser(parse_comment, (SubmissionError,), ("elastic:2-16 first try",)),
    "topology": Parser(switches.parse_topology, (), (_TOPOLOGY,)),
    "gres.conf": Parser(gres.parse_link_domains, (),
        ("NodeName=g[01-02] Name=gpu File=/dev/nvidia[0-3] Links=-1,4,0,0\n",)),
    "qos": Parser(limits.parse_qos, (), ("normal|gres/gpu=8,mem=2G|cpu=4||node=2|1-02:00:00\n",)),
    "associations": Parser(limits.parse_associations, (),
        ("physics|alice||root|gres/gpu:a100=4|cpu=8|00:30:00\n",)),
    "settings": Parser(slurm_settings.parse_settings, (), ("KillWait = 30 sec\nPrivateData = jobs\n",)),
    "option list": Parser(slurm_settings.options, (), ("a=1,b,c=2",)),
    "seconds": Parser(slurm_settings.seconds, (), ("30 sec", "UNLIMITED")),
    "elastic.toml": Parser(schema.parse, (schema.ConfigError,), (_TOML, _TOML.replace("\n# ", "\n"))),
    "time": Parser(_time, (ValueError,), ("now-2days", "2026-11-20T14:00:00", "today")),
    "address": Parser(frames.parse_address, (frames.ControllerUnreachableError,), ("ctld:7321", "[::1]:7321")),
    "listen": Parser(listening_thread.split_address, (OSError,), ("0.0.0.0:7321", "[::]:7321")),
}  # fmt: skip

_SLOWEST_S = 2.0


def one(rng: random.Random) -> str:
    """Parse one text with one parser."""
    name = rng.choice(sorted(PARSERS))
    parser = PARSERS[name]
    text = inputs.near(rng, rng.choice(parser.seeds)) if rng.random() < 0.8 else inputs.text(rng)
    return tried(name, lambda: parser.read(text), parser.refuses, size=len(text))


def tried(
    name: str,
    read: Callable[[], Any],
    refuses: tuple[type[Exception], ...],
    *,
    size: int,
    slowest_s: float = _SLOWEST_S,
    ours: bool = False,
) -> str:
    """Read or refused; the refusal is one line that a terminal survives, and `ours` of a type of ours."""
    begun = time.process_time()
    try:
        read()
        return f"{name}: read"
    except refuses as error:
        shown = formatting.clean(error)
        assert len(shown) < 3000, f"a refusal of {len(shown)} characters"
        assert not ours or type(error).__module__.startswith("slurm_elastic"), repr(error)
        return f"{name}: refused"
    finally:
        spent = time.process_time() - begun
        assert spent < slowest_s, f"{spent:.1f} s for a size of {size}"


def run(seconds: float, seed: int) -> Tally:
    """Run for some seconds; see `tally.drive`."""
    checked_log.quiet()
    return drive(one, seconds=seconds, seed=seed)


def file(rng: random.Random, path: Path, seed: bytes) -> None:
    """Write a changed file."""
    with contextlib.suppress(UnicodeDecodeError):
        if rng.random() < 0.7:
            seed = inputs.near(rng, seed.decode()).encode("utf-8", "surrogatepass")
            path.write_bytes(seed)
            return
    path.write_bytes(inputs.bytes_(rng, seed))
