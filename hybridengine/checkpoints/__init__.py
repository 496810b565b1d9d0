"""Checkpoints of runs as folders: completeness, retention, and reading without trusting their contents."""
