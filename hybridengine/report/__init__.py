"""Metrics of a run while it trains, and its report."""
