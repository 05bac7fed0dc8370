"""Tensor parallelism: the ranks of a group share the weights of linear layers and attention.

Each rank of a group computes the same samples with its part of the weights. A *column-parallel*
layer has some of the output features on each rank, a *row-parallel* one some of the input features,
so that its outputs are sums over the group; a column-parallel layer followed by a row-parallel one
needs one sum in the forward and one in the backward pass (Megatron-LM, arXiv 1909.08053). Outside
such layers, activations and gradients are the same on all ranks of a group.
"""
