"""Do once, in the server of ranks, what each rank would do at its start. Imported last by it."""

import gc

from torch._subclasses.fake_tensor import FakeTensorMode

# Loads the settings of the compiler, which the first DTensor reads.
FakeTensorMode()
# A full collection of a rank would walk through all modules of torch, and so copy the memory that
# the rank shares with the server.
gc.collect()
gc.freeze()
