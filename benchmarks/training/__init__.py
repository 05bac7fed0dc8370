"""The training library: overhead in a loop of the script's own, accuracy, rounding."""
