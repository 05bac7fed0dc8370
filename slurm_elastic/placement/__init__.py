"""From decided GPU counts to nodes. Pure."""
