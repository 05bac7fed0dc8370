"""For how long ranks stand."""

from slurm_elastic.job.unmodified.rank_freeze import FROZEN_S, RankFreeze


class Handler:
    """Signal handler of ranks that can or cannot be frozen."""

    def __init__(self, *, can_freeze: bool) -> None:
        self.can_freeze = can_freeze
        self.calls: list[str] = []

    def guard(self) -> None:
        self.calls.append("guard")

    def freeze(self) -> bool:
        self.calls.append("freeze")
        return self.can_freeze

    def arm(self) -> None:
        self.calls.append("arm")

    def unguard(self) -> None:
        self.calls.append("unguard")


def test_ranks_that_no_requeue_ends_are_late() -> None:
    now = 0.0
    handler = Handler(can_freeze=True)
    freeze = RankFreeze(handler, lambda: now)
    assert not freeze.is_late
    freeze.begin()
    now = FROZEN_S - 1
    assert freeze.is_frozen
    assert not freeze.is_late
    now = FROZEN_S
    assert freeze.is_late
    freeze.end()
    assert not freeze.is_frozen
    assert handler.calls == ["guard", "freeze", "unguard", "guard"]


def test_ranks_that_cannot_be_frozen_are_never_late() -> None:
    now = 0.0
    freeze = RankFreeze(Handler(can_freeze=False), lambda: now)
    freeze.begin()
    now = 2 * FROZEN_S
    assert not freeze.is_late
