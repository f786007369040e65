"""What to do about a failure, and doing it.

Read in this order: `policy` (what to do about a verdict, and how often a job may be restarted), `cordon` (which nodes
it may not use), `checkpoint` and `formats` (where to resume), `provenance` (which files are the job's), `quarantine`
(the only module here that changes files), `scheduling` and `schedulers` (who gave the nodes).
"""
