"""Benchmarks on real ranks: what a switch of the weights costs, beside the methods that others use."""
