"""`unbroken check`: what is wrong with this node now."""
