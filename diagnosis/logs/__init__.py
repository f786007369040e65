"""Logs: where their lines come from, which of them may mean something, what they tell, and in how few words."""
