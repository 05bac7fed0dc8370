"""`selastic install` and `selastic uninstall` into a folder that stands for /."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from slurm_elastic.cli.installation import site_files

TOP = Path(__file__).parents[3]
CONF = "etc/slurm-elastic/elastic.toml"
UNIT = "usr/local/lib/systemd/system/selasticd.service"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


def files(root):
    """All files and links, relative to the root."""
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file()}


def test_everything_is_put_in_place_and_removed_again(run, root):
    code, out, err = run("install", "--root", root)
    assert (code, err) == (0, "")
    present = files(root)
    assert present >= {
        CONF, UNIT, "etc/sysusers.d/selastic.conf", "etc/default/selasticd",
        "usr/local/share/man/man8/selasticd.8",
        "usr/local/share/bash-completion/completions/selastic",
        "usr/local/share/slurm-elastic/lua/slurm_elastic_shape.lua",
        "usr/local/share/slurm-elastic/plugins/spank/elastic.c",
    }  # fmt: skip
    assert f"write  /{CONF}" in out
    assert (root / "usr/local/bin/esrun").readlink() == Path(sys.prefix, "bin/esrun")
    assert "\nExecStart=/usr/local/bin/selasticd -D " in (root / UNIT).read_text()
    lua = (root / "usr/local/share/slurm-elastic/lua/job_submit.lua").read_text()
    assert "/usr/local/share/slurm-elastic/lua/?.lua" in lua

    assert run("uninstall", "--root", root)[0] == 0
    assert files(root) == {CONF, "etc/default/selasticd"}
    assert not (root / "usr/local/share/slurm-elastic").exists()


def test_other_users_can_read_what_root_installs_with_a_narrow_umask(run, root):
    before = os.umask(0o077)
    try:
        run("install", "--root", root)
    finally:
        os.umask(before)
    assert all(p.stat().st_mode & 0o004 for p in root.rglob("*") if not p.is_symlink())


def test_a_dry_run_says_the_same_and_writes_nothing(run, root):
    planned = run("install", "--root", root, "-n")
    assert not root.exists()
    assert run("install", "--root", root) == planned
    before = files(root)
    assert "remove /usr/local/bin/esrun" in run("uninstall", "--root", root, "-n")[1]
    assert files(root) == before


def test_installing_again_replaces_its_own_files_and_keeps_configuration(run, root, monkeypatch):
    run("install", "--root", root)
    (root / CONF).write_text('mode = "act"\n')
    old = site_files._RULES
    rules = tuple(r for r in old if not r.pattern.startswith("docs/man"))
    monkeypatch.setattr(site_files, "_RULES", rules)
    code, out, _ = run("install", "--root", root)
    assert code == 0
    assert f"keep   /{CONF} (configuration)" in out
    assert (root / CONF).read_text() == 'mode = "act"\n'
    # What a release does not have any more goes.
    assert "remove /usr/local/share/man/man1/esrun.1" in out
    assert not (root / "usr/local/share/man/man1/esrun.1").exists()
    run("uninstall", "--root", root)
    assert (root / CONF).read_text() == 'mode = "act"\n'


def test_a_file_of_others_is_not_replaced_and_then_nothing_is_written(run, root):
    foreign = root / "usr/local/bin/selastic"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("theirs")
    code, out, err = run("install", "--root", root)
    assert (code, out) == (1, "")
    assert err == (
        "selastic: install: /usr/local/bin/selastic: is not of slurm-elastic:"
        " move it away, or use another --prefix\n"
    )
    assert files(root) == {"usr/local/bin/selastic"}


def test_a_file_that_was_changed_is_neither_replaced_nor_removed(run, root):
    run("install", "--root", root)
    (root / UNIT).write_text("[Service]\n")
    code, _, err = run("install", "--root", root)
    assert code == 1
    assert f"/{UNIT}: was changed since" in err
    code, out, _ = run("uninstall", "--root", root)
    assert code == 0
    assert f"keep   /{UNIT} (changed since it was installed)" in out
    assert files(root) == {CONF, UNIT, "etc/default/selasticd"}


def test_a_compute_node_gets_no_service(run, root):
    run("install", "--root", root, "--node", "compute")
    present = files(root)
    assert "usr/local/bin/esrun" in present
    assert not [name for name in present if "selasticd" in name or name.endswith("bin/selastic")]


def test_a_prefix_that_systemd_does_not_search_gets_its_unit_in_etc(run, root):
    run("install", "--root", root, "--prefix", "/opt/elastic")
    unit = root / "etc/systemd/system/selasticd.service"
    assert "\nExecStart=/opt/elastic/bin/selasticd -D " in unit.read_text()


def test_nothing_to_remove_and_relative_paths_are_one_line(run, root):
    code, _, err = run("uninstall", "--root", root, "--prefix", "/opt/x")
    assert code == 1
    assert err.endswith("no such record: nothing was installed with this --prefix\n")
    assert run("install", "--prefix", "opt")[0] == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_without_rights_it_is_one_line(run):
    code, _, err = run("install")
    assert code == 1
    assert err.endswith("run it as root\n")


def test_the_wheel_carries_all_of_it():
    project = tomllib.loads((TOP / "pyproject.toml").read_text("utf-8"))
    packed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for rule in site_files._RULES:
        sources = [str(p.relative_to(TOP)) for p in TOP.glob(rule.pattern)]
        for source in sources:
            assert any(f"{source}/".startswith(f"{part}/") for part in packed), source
        assert sources, rule.pattern
    assert all(target == f"slurm_elastic/share/{part}" for part, target in packed.items())
