"""Active tests: devices, pairs and groups of nodes are tried, before a job, after a failure, and before a return."""
