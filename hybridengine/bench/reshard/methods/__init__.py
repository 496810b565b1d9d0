"""Compared methods, each implemented as efficiently as its design allows."""
