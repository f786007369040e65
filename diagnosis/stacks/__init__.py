"""Stacks of any tool: what a rank is doing, and whom the others wait for."""
