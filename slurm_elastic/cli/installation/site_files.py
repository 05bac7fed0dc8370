"""Files that a site needs beside the Python package, and where each belongs.

The wheel carries them as `slurm_elastic/share`, in the folders of the source tree. Run from the
source tree, they are read from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import slurm_elastic

#: Kinds of nodes, each with the files that only it needs.
NODE_KINDS = ("controller", "login", "compute")
#: Prefixes below which systemd finds units.
_UNIT_PREFIXES = ("/usr", "/usr/local")
#: Folder into which packages put the Lua modules: job_submit.lua names it.
_PACKAGED_DATA = "/usr/share/slurm-elastic"
_EVERYWHERE = frozenset(NODE_KINDS)
_CONTROLLER = frozenset({"controller"})
_PEOPLE = frozenset({"controller", "login"})


@dataclass(frozen=True)
class SiteFile:
    """File or link of a site, as it will be.

    Attributes:
        target: absolute path on the site's machine.
        content: its bytes; None for a link.
        link: what the link points to; "" for a file.
        is_configuration: it belongs to the site once it is there: never replaced, never removed.
    """

    target: Path
    content: bytes | None = None
    link: str = ""
    is_configuration: bool = False


@dataclass(frozen=True)
class _Rule:
    """Files of the source tree, by a pattern, and the folder where they belong."""

    pattern: str
    folder: str
    nodes: frozenset[str] = _EVERYWHERE
    name: str = ""
    is_configuration: bool = False


_RULES = (
    _Rule("docs/man/elastic.toml.5", "{man}/man5"),
    _Rule("docs/man/es*.1", "{man}/man1"),
    _Rule("docs/man/selastic.1", "{man}/man1", _PEOPLE),
    _Rule("docs/man/selasticd.8", "{man}/man8", _CONTROLLER),
    _Rule("contrib/completion/selastic.bash", "{completion}", _PEOPLE, name="selastic"),
    _Rule("etc/sysusers.d/selastic.conf", "{sysusers}"),
    _Rule("etc/systemd/selasticd.service", "{units}", _CONTROLLER),
    _Rule("etc/default/selasticd", "/etc/default", _CONTROLLER, is_configuration=True),
    _Rule("etc/elastic.toml", "/etc/slurm-elastic", is_configuration=True),
    _Rule("plugins/lua/*.lua", "{data}/lua", _CONTROLLER),
    _Rule("plugins/spank/Makefile", "{data}/plugins/spank"),
    _Rule("plugins/spank/*.[ch]", "{data}/plugins/spank"),
    _Rule("plugins/spank/elastic.map", "{data}/plugins/spank"),
    _Rule("etc/plugstack.conf.d/elastic.conf", "{data}/etc/plugstack.conf.d"),
)
#: Commands, and on which nodes.
_COMMANDS = {"esrun": _EVERYWHERE, "esbatch": _EVERYWHERE, "selastic": _PEOPLE} | {
    "selasticd": _CONTROLLER
}


def shared_folder() -> Path:
    """Return the folder that holds the files: of the wheel, or the source tree."""
    package = Path(slurm_elastic.__file__).resolve().parent
    packed = package / "share"
    return packed if packed.is_dir() else package.parent


def data_folder(prefix: Path) -> Path:
    """Return the folder for data of slurm-elastic below a prefix."""
    return prefix / "share/slurm-elastic"


def site_files(
    prefix: Path, nodes: Iterable[str], *, commands: Path | None, source: Path | None = None
) -> Iterator[SiteFile]:
    """Yield the files of the given kinds of nodes.

    Args:
        prefix: as in --prefix.
        nodes: kinds of nodes.
        commands: folder of the commands that PREFIX/bin shall link to; None: no links.
        source: folder that holds the files; by default that of this installation.
    """
    chosen = frozenset(nodes)
    source = source or shared_folder()
    folders = _folders(prefix)
    for rule in _RULES:
        for path in sorted(source.glob(rule.pattern)) if rule.nodes & chosen else ():
            target = Path(rule.folder.format(**folders), rule.name or path.name)
            content = _fitted(path, prefix)
            yield SiteFile(target, content, is_configuration=rule.is_configuration)
    for name, kinds in _COMMANDS.items():
        if commands is not None and commands != prefix / "bin" and kinds & chosen:
            yield SiteFile(prefix / "bin" / name, link=str(commands / name))


def _folders(prefix: Path) -> dict[str, str]:
    is_searched = str(prefix) in _UNIT_PREFIXES
    return {
        "man": f"{prefix}/share/man",
        "completion": f"{prefix}/share/bash-completion/completions",
        "data": str(data_folder(prefix)),
        "units": f"{prefix}/lib/systemd/system" if is_searched else "/etc/systemd/system",
        # Older releases of systemd-sysusers do not look below /usr/local.
        "sysusers": "/usr/lib/sysusers.d" if str(prefix) == "/usr" else "/etc/sysusers.d",
    }


def _fitted(path: Path, prefix: Path) -> bytes:
    """Return the content of a file, with the paths of this prefix."""
    content = path.read_bytes()
    if path.name == "selasticd.service":
        line = f"ExecStart={prefix}/bin/selasticd ".encode()
        content = re.sub(rb"^ExecStart=selasticd ", lambda _: line, content, flags=re.MULTILINE)
    elif path.name == "job_submit.lua":
        content = content.replace(_PACKAGED_DATA.encode(), str(data_folder(prefix)).encode())
    return content
