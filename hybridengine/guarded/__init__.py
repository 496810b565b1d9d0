"""User code in a process of its own, which ends with the process that started it, whatever the code does."""
