"""Weight synchronisation: storages, ledger, transport, plan execution and the HybridEngine."""
