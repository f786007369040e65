"""What both ends of the wire need: proof of the job's token, peers of unix sockets, limits for strangers, TLS."""
