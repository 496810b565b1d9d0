"""Checkpoints of runs as folders: what makes one complete, which are kept, and reading them without trusting them."""
