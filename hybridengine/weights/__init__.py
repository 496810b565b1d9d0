"""Parts of a rank: batches, storages, the ledger, transports, the plan executor and the HybridEngine."""
