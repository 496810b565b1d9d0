"""Diagnosis of an installation or a cluster, with remedies."""
