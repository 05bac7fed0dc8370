"""Steps of a transition, by kind: requeue, in place, and restart of the ranks."""
