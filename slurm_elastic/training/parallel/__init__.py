"""Division of the work among the ranks of an attempt: data, sharded and pipeline parallelism."""
