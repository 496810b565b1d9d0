"""A run's iteration on one rank without its devices: real shapes and group calls, no values, counted bytes."""
