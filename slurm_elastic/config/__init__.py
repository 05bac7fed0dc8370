"""`elastic.toml`: schema, defaults, validation and generated documentation."""
