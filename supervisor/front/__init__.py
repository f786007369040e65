"""`unbroken run`: the user's end of a node."""
