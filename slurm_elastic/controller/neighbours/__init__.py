"""Learning how jobs on one node slow each other down."""
