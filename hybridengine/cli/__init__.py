"""Commands: modules with DESCRIPTION, EPILOG, `add_options(parser)` and `run(options)`, which returns the exit status."""
