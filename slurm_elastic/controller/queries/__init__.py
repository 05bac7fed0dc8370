"""Answers to questions of users: pure functions from a `View` to JSON objects."""
