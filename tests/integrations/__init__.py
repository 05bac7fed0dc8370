"""Trainings of other frameworks in changing worlds; needs requirements/integrations.txt."""
