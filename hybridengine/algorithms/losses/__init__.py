"""Losses of the actor and of critics."""
