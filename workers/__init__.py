"""The roles of an RL dataflow as plain worker classes, without Ray."""
