"""What a run will need: memory per rank and phase. No torch."""
