"""`selastic recommend`: the GPUs on which a training is fastest or cheapest."""
