"""How long tests wait for a process or a message that is sure to come."""

#: Seconds: tests of several kinds share two cores, on which a process may wait long for its turn.
PATIENCE_S = 120.0
