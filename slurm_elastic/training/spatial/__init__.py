"""Spatial groups: one sample cut in space over several ranks.

Each rank of a group holds a slab of every input, activation and gradient; weights are replicated. A
`SlabTensor` is such an activation: layers that are applied to it exchange the planes that they need
with the neighbours. All gradients are those of the sum of the ranks' losses, so that a group, whose
ranks each compute the same loss, divides it by their number, and a sum over all ranks is right for
each parameter.
"""
