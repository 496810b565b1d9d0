"""A run from its configuration to its end: files, ranks, iterations, checkpoints and what a person sees of it."""
