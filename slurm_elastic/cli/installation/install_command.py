"""`selastic install` and `selastic uninstall`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from slurm_elastic.cli import options
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.installation import installed_files
from slurm_elastic.cli.installation.installed_files import Change, InstallationError, Site
from slurm_elastic.cli.installation.site_files import NODE_KINDS, data_folder, site_files

_prefix = click.option(
    "--prefix", metavar="DIR", default="/usr/local", show_default=True,
    help="Folder of bin, share and lib.",
)  # fmt: skip
_root = click.option(
    "--root", metavar="DIR", default="/", help="Folder that stands for /, to build a package in."
)


@options.verb
@_prefix
@_root
@click.option(
    "--node", "nodes", multiple=True, type=click.Choice(NODE_KINDS), default=NODE_KINDS,
    help="Install what this kind of node needs; repeatable. Default: all.",
)  # fmt: skip
@click.option("--no-commands", is_flag=True, help="Leave out the links to the commands.")
@options.dry_run
def install(
    prefix: str, root: str, nodes: tuple[str, ...], no_commands: bool, dry_run: bool
) -> None:
    """Put the service, account, manuals, completion, Lua modules and plugin source in place.

    PREFIX/bin gets links to the commands of this environment. Configuration that is there is kept,
    and no file of others is replaced: then nothing is written at all. Nothing is started.
    """
    where = _absolute(prefix, "--prefix")
    commands = None if no_commands else Path(sys.prefix, "bin")
    site = Site(data_folder(where), _absolute(root, "--root"))
    try:
        changes = site.plan(site_files(where, nodes, commands=commands))
        _carry_out(site, changes, dry_run=dry_run)
    except InstallationError as error:
        raise CliError(f"install: {error}") from None
    if root == "/" and not dry_run:
        options.put(_next_steps(where, nodes))


@options.verb
@_prefix
@_root
@options.dry_run
def uninstall(prefix: str, root: str, dry_run: bool) -> None:
    """Remove what `selastic install` wrote with this prefix.

    Configuration, files that were changed since, the account and /var/lib/selastic stay.
    """
    site = Site(data_folder(_absolute(prefix, "--prefix")), _absolute(root, "--root"))
    try:
        _carry_out(site, site.plan_removal(), dry_run=dry_run)
    except InstallationError as error:
        raise CliError(f"uninstall: {error}") from None


def _carry_out(site: Site, changes: list[Change], *, dry_run: bool) -> None:
    installed_files.describe(changes, click.echo)
    if not dry_run:
        os.umask(0o022)
        try:
            site.carry_out(changes)
        except OSError as error:
            place = error.filename2 or error.filename
            raise InstallationError(f"{place}: {error.strerror}: run it as root") from None


def _absolute(text: str, option: str) -> Path:
    if not text.startswith("/"):
        raise CliError(f'{option}: "{text}" is invalid: expected an absolute path', USAGE)
    return Path(text)


def _next_steps(prefix: Path, nodes: tuple[str, ...]) -> list[str]:
    data = shlex.quote(str(data_folder(prefix)))
    lines = ["", "next (docs/install-sites.md):", "  systemd-sysusers"]
    lines += [f"  make -C {data}/plugins/spank install"]
    if "controller" in nodes:
        lines += [
            f"  cp -n {data}/lua/job_submit.lua /etc/slurm/     # slurmctld's host, if it has none",
            "  sacctmgr -i add user selastic account=root adminlevel=Operator",
            "  systemctl daemon-reload && systemctl enable --now selasticd",
        ]
    return lines
