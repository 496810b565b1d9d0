"""Planning of runs: placements, sizes, seconds and memory. No torch."""
