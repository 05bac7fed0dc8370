"""The solver prints nothing: answers in JSON stand on the same standard output."""

from slurm_elastic.policies.milp.quiet_highs import QuietHighs


def test_nothing_is_printed_from_the_begin_to_the_solution(capfd):
    highs = QuietHighs()
    highs.addVar(0.0, 1.0)
    highs.run()
    assert capfd.readouterr() == ("", "")
