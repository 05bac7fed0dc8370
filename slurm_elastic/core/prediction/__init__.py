"""Values that predictions consist of."""
