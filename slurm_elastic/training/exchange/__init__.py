"""Exchange of gradients between replicas, while the backward pass still computes."""
