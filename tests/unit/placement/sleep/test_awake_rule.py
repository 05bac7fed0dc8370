"""Our rule: nodes in use lately and a learned margin; nothing sleeps without history."""

import numpy as np

from slurm_elastic.placement.sleep.awake_rule import LEAST_HISTORY, AwakeRule, replayed

RULE = AwakeRule(window=6, served=0.99)


def series(bins=1000, *, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(np.cumsum(rng.integers(-3, 4, size=bins)) + 100, 20, 180).astype(float)


def test_nothing_sleeps_before_a_day_is_known():
    assert RULE.awake(series(LEAST_HISTORY - 1), 200) == 200
    assert RULE.awake(np.full(LEAST_HISTORY, 50.0), 200) == 51


def test_nodes_in_use_lately_stay_awake_with_a_margin():
    used = np.r_[np.full(500, 50.0), 90.0, np.full(3, 50.0)]
    assert RULE.awake(used, 200) >= 91
    assert RULE.awake(np.r_[used, np.full(6, 50.0)], 200) < 91


def test_a_rise_beyond_the_margin_is_expected_to_go_on_for_two_bins():
    calm = np.full(500, 50.0)
    for rise, nodes in (
        ([70.0], 90),
        ([70.0, 75.0], 100),
        ([70.0, 85.0, 85.0], 100),  # 15 more than in the bin before the last two
        ([70.0, 75.0, 75.0, 75.0], 75),
        ([45.0, 50.0], 50),  # no more than before
        ([60.0], 60),  # not beyond the margin
    ):
        assert RULE.awake(np.r_[calm, rise], 200, margin=10.0) == nodes + 10


def test_what_pending_jobs_need_is_awake_before_they_wait():
    used = np.full(500, 50.0)
    assert RULE.awake(used, 200, needed=30) == 81
    assert RULE.awake(used, 60, needed=30) == 60


def test_the_margin_serves_the_stated_part_of_the_bins():
    used = series(6000)
    for served in (0.9, 0.99):
        awake = replayed(used, 400, AwakeRule(window=6, served=served))
        lacked = (used > awake)[1000:].mean()
        assert lacked < 2.5 * (1 - served)
    assert replayed(used, 400, RULE)[2000:].mean() < 250


def test_what_comes_later_wakes_nothing_now():
    used = series(1000)
    other = used.copy()
    other[600:] = 180.0
    assert (replayed(used, 400, RULE)[:600] == replayed(other, 400, RULE)[:600]).all()
