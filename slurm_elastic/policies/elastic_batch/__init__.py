"""Policy `elastic_batch`: GPUs and batch sizes by an exact dynamic program."""
