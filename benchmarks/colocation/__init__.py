"""Jobs that share a GPU or the cores of a node."""
