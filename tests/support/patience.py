"""How long tests wait for a process or a message that is sure to come."""

#: Seconds. Unit tests that run beside cluster tests yield to these: on two slow cores a process
#: then gets a tenth of a core for minutes.
PATIENCE_S = 600.0
