"""RL dataflows in plain Python over worker groups, one file each."""
