"""Leave the modules that the server of ranks has imported out of garbage collections.

Imported last by the server. Otherwise each full collection of a rank walks through all modules of
torch, and so copies the memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
