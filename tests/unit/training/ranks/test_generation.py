"""Members of the next generation."""

import pytest

from slurm_elastic.training.ranks.generation import Generation, next_members

NOW = Generation(3, ("17.0", "17.1", "5.0", "5.1"))


@pytest.mark.parametrize(
    ("desired", "present", "expected"),
    [
        ({"5": 2}, set(), None),
        ({"5": 2, "9": 1}, set(), None),
        ({"5": 2, "9": 2}, {"9.0"}, None),
        ({"5": 2, "9": 1}, {"9.0"}, (*NOW.members, "9.0")),
        # In the order of the job ids, whatever the order in which they are stated.
        ({"10": 1, "9": 1, "5": 2}, {"9.0", "10.0"}, (*NOW.members, "9.0", "10.0")),
        # One of two is not there: both wait, as the controller has ordered both.
        ({"5": 2, "9": 1, "10": 1}, {"9.0"}, None),
        # Whoever is to leave does not wait for others to come.
        ({"9": 1}, set(), ("17.0", "17.1")),
        ({"9": 1}, {"9.0"}, ("17.0", "17.1")),
        ({}, {"9.0"}, ("17.0", "17.1")),
    ],
)
def test_members_follow_what_is_desired(
    desired: dict[str, int], present: set[str], expected: tuple[str, ...] | None
) -> None:
    assert next_members(NOW, desired=desired, present=present) == expected


def test_a_generation_travels_as_json() -> None:
    joined = Generation(4, (*NOW.members, "9.0"), ("9.0",))
    assert Generation.from_wire(joined.to_wire()) == joined
    assert joined.base == "17"
    assert joined.companions == {"5": 2, "9": 1}
