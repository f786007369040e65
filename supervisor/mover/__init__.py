"""The process that moves checkpoints between a node's disk, a peer's, and the shared folder (docs/checkpoints.md)."""
