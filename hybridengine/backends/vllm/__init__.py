"""vLLM as a generation engine inside a rank's own process."""
