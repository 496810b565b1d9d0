"""The single controller: pools of rank processes, worker groups, and the results of their calls (Ray)."""
