"""What the agent looks at, without disturbing it: ranks, their output, checkpoints, the kernel log."""
