"""Requests to the controller and its answers: frames, munge authentication, schema."""
