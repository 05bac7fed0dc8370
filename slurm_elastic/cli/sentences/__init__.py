"""English sentences of the codes of reasons, by the same parts as their definitions."""
