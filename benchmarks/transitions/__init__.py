"""Many transitions at once on the container cluster."""
