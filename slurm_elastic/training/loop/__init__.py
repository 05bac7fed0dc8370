"""Trainings whose loop belongs to the script.

elastic_loop     the object that the script makes
elastic_loader   its data loader
loop_arguments   checks of its arguments
loop_position    present step and micro-batch
step_boundary    exchange of requests between two steps
live_loop        parts that change with the ranks
"""
