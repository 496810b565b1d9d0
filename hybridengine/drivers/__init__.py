"""RL dataflows as plain Python over worker groups: one file each."""
