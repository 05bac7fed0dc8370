"""Which jobs stand beside each other."""
