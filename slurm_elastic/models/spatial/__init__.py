"""Memory of a training in spatial groups, from the layers of its model."""
