"""Model families: one file for each, and `registry`, which lists them."""
