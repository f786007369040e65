#!/bin/bash
# Slurm's Epilog: drains this node where the job that ends here has asked for that and may not do it itself, and where it
# has left something behind that would harm the next one.
#
# In slurm.conf (slurmd runs it as root):
#
#   Epilog=/opt/unbroken/epilog.sh

# slurmd gives the program its own variables only: no PATH to our environment, and no SLURM_CONF.
export PATH="${UNBROKEN_BIN:-/opt/unbroken/bin}:$PATH"
node=${SLURMD_NODENAME:-$(hostname -s)}

timeout 50 unbroken drain-requests --node-name "$node" 2>&1 | logger -t unbroken 2>/dev/null

# An Epilog that fails has the node drained; one line, only for what is critical.
reason=$(unbroken check --slurm epilog --node-name "$node" 2>/dev/null)
[ -n "$reason" ] || exit 0
logger -t unbroken "$reason" 2>/dev/null
exit 1
