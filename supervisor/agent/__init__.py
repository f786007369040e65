"""The agent of a node: watches its ranks and its hardware, keeps evidence, brings the node to its assigned state."""
