"""The commands about one job: reading it, and operators' orders."""
