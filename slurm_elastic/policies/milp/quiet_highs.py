"""The solver HiGHS, without its own output."""

import highspy


class QuietHighs(highspy.Highs):  # type: ignore[misc]
    """HiGHS that prints nothing, for answers in JSON on standard output.

    From 1.16 on it prints its version and licence when callbacks are enabled, which its constructor
    does.
    """

    def enableCallbacks(self) -> None:  # noqa: N802 - HiGHS's name
        """Switch its output off, then enable its callbacks."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
