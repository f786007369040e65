#!/bin/bash
# Slurm's Prolog: a job does not start on a node that is critically ill, or whose GPUs fail the quick active tests.
#
# In slurm.conf (slurmd runs it as root; the tests take a minute at most, so PrologEpilogTimeout must be longer):
#
#   Prolog=/opt/unbroken/prolog.sh
#   PrologEpilogTimeout=180
#   SchedulerParameters=nohold_on_prolog_fail    # else Slurm holds the job that it requeues, until `scontrol release`
#
# UNBROKEN_TRAINING_PYTHON: the Python of an environment that has torch; without one the active tests are left out. A Prolog that fails has the node drained and the job requeued, so only wrong data and what failed twice counts;
# a node that others use is not tested, and nothing that is wrong with the test itself counts.

# slurmd gives the program its own variables only: no PATH to our environment, and no SLURM_CONF.
export PATH="${UNBROKEN_BIN:-/opt/unbroken/bin}:$PATH"
node=${SLURMD_NODENAME:-$(hostname -s)}

reason=$(timeout -k 5 50 unbroken check --slurm prolog --node-name "$node" 2>/dev/null)
if [ -z "$reason" ] && [ -n "$UNBROKEN_TRAINING_PYTHON" ]; then
  reason=$(timeout -k 5 100 unbroken check --active quick --slurm prolog --python "$UNBROKEN_TRAINING_PYTHON" --node-name "$node" 2>/dev/null)
fi
[ -n "$reason" ] || exit 0
logger -t unbroken "$reason" 2>/dev/null
timeout 10 scontrol update NodeName="$node" State=DRAIN Reason="${reason:0:200}" 2>/dev/null  # else: "Prolog error"
exit 1
