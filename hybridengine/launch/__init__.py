"""Launch of a run on several machines: scripts and manifests for schedulers, and the process that each node runs."""
