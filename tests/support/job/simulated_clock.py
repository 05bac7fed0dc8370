"""Clock that a test sets."""


class SimulatedClock:
    """Stand-in for `time.monotonic`; `now` is what it returns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
