"""Values that every other package shares: cluster, directive, plan, report, layout."""
