"""Benchmark of the Tinker server: its own time per request, beside the time on the ranks."""
