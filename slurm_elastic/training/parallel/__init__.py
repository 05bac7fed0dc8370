"""How the ranks of one attempt share the work: data, sharded and pipeline parallelism."""
