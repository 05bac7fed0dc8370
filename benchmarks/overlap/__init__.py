"""Exchange of gradients during the backward pass, on one machine and between nodes."""
