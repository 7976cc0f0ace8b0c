"""Slurm: what its environment says, and the batch scripts that start us under it."""
