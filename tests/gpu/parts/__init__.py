"""The parts of the kit, each a program of its own: one that fails or hangs stops no other."""
