"""A whole controller on a simulated Slurm."""

from slurm_elastic.config.schema import parse
from tests.support.controller.simulated_script import SimulatedScript
from tests.support.controller.simulated_slurm import SimulatedSite, short_trials
from tests.unit.controller.transitions.test_failed_changes import play, sizes


def test_while_a_change_is_under_way_looks_at_its_job_suffice(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4, "n2": 4}, short_trials())
    read = site.slurm.jobs
    all_read = []
    monkeypatch.setattr(site.slurm, "jobs", lambda: all_read.append(site.slurm.now) or read())
    monkeypatch.setattr(site.controller.schedule, "full_read_is_due", lambda: False)
    site.slurm.submit(7, elastic="1-4", gpus=1)
    site.slurm.submit(8, gpus=4)
    scripts = [SimulatedScript(site, 7)]
    while not site.controller.engine.live:
        play(site, scripts, 0.5)
    before = len(all_read)
    looks = 0
    while site.controller.engine.live:
        play(site, scripts, 0.5)
        looks += 1
    assert sizes(site) == [1, 4]
    assert len(all_read) - before < looks / 2, "rounds read all jobs"
    site.close()


def test_a_look_at_nothing_new_leaves_the_view_as_it_is(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4})
    try:
        site.look()
        site.look()
        view = site.controller.view
        site.look()
        assert site.controller.view is view
    finally:
        site.close()


def test_a_changed_configuration_reaches_every_part(monkeypatch):
    site = SimulatedSite(monkeypatch, {"n1": 4})
    try:
        former, fresh = site.controller.config, parse("[controller]\nseed = 7")
        before = set(parts_with(site.controller, former))
        site.controller.reconfigure(fresh)
        assert not set(parts_with(site.controller, former))
        assert set(parts_with(site.controller, fresh)) == before
        assert len(before) > 10
    finally:
        site.close()


def parts_with(part, config, seen=None):
    """Yield the classes of a part of the controller and of its parts that hold a configuration."""
    seen = set() if seen is None else seen
    if id(part) in seen or not type(part).__module__.startswith("slurm_elastic."):
        return
    seen.add(id(part))
    for value in vars(part).values() if hasattr(part, "__dict__") else ():
        if value is config:
            yield type(part).__name__
        else:
            yield from parts_with(value, config, seen)
