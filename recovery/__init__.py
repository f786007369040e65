"""What to do about a failure, and doing it.

Read in this order: `actions` (the words), `policy` (what to do about a verdict, and how often a job may be restarted),
`cordon` and `patience` (what bounds it), `checkpoint` and `formats` (where to resume), `provenance` (which files
are the job's), `quarantine` (the only module here that changes files).
"""
