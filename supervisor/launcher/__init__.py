"""The user's launcher: what its command means, and the Python it runs."""
