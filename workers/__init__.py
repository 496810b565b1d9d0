"""The roles of an RL dataflow as plain worker classes: one role each, no Ray inside."""
