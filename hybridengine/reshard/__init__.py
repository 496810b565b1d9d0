"""Layouts of a model over ranks, and plans that turn one layout into another. No torch, no GPU."""
