"""Training runs: their files, ranks, iterations, checkpoints and output."""
