"""From reports to predictions of any configuration."""
