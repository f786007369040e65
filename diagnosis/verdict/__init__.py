"""From what was seen to a verdict: who failed first, and of what."""
