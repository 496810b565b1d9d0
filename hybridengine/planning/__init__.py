"""Planning of runs: placements, sizes, seconds and memory. Does not need torch."""
