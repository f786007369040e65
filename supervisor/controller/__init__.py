"""The controller of a job: hears the agents, journals what happens, asks the job what to do, and does it."""
