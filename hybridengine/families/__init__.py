"""Model families, one file each, listed in `registry`."""
