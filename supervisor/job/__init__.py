"""The job: one state machine that sees every event and says what is to be done. Pure."""
