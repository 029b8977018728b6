"""Checkpoints of other programs become the first epoch of a job."""
