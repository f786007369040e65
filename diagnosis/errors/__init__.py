"""Errors of Python programs: tracebacks, exceptions, and the code they came through."""
