"""What went wrong, where, how sure, on what evidence.

Read in this order: `taxonomy` (the closed list of failures), `signals` (what is observed), `incident` (what belongs
together and what is concluded), then `rules`, `steps`, `stacks`, `hang` and `triage`, which decide. No I/O here.
"""
