"""Layouts of a model over ranks, and plans that convert one layout into another. No torch, no GPU."""
