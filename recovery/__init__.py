"""What to do about a failure, and doing it.

Read in this order: `actions` (the words), `policy` (what to do about a verdict), `budgets` and `cordon` (what bounds
it), `checkpoint` and `formats` (where to resume), `quarantine` (the only module here that changes files).
"""
