"""Ranks and coordinates: sizes, process groups of any axes, generation groups. Standard library only."""
