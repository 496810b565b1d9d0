"""Ranks and coordinates: parallel sizes, process groups along any axes, generation groups. Standard library only."""
