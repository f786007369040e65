"""`unbroken diagnose`: what went wrong, from what is left of a job."""
