"""What is wrong with an installation or a cluster, and what to do about it."""
