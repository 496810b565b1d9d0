"""Benchmarks on real ranks: weight switches, transfers of rows, whole steps, and calibration."""
