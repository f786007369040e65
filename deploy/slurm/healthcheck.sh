#!/bin/bash
# Slurm's HealthCheckProgram: drains this node when something critical is wrong with it, whether or not a job runs.
#
# In slurm.conf (slurmd runs it as root, and kills it after 60 s):
#
#   HealthCheckProgram=/opt/unbroken/healthcheck.sh
#   HealthCheckInterval=300
#   HealthCheckNodeState=ANY,CYCLE
#
# A node that somebody drained already keeps the reason it has; one is never given back to service from here.

# slurmd gives the program its own variables only: no PATH to our environment, and no SLURM_CONF.
export PATH="${UNBROKEN_BIN:-/opt/unbroken/bin}:$PATH"
node=${SLURMD_NODENAME:-$(hostname -s)}

# Jobs of users who may not drain nodes leave requests on the node (docs/slurm.md#rights); without their folder this does
# nothing.
timeout 50 unbroken drain-requests --node-name "$node" 2>&1 | logger -t unbroken 2>/dev/null &

# One line for each critical failure, the worst first; nothing that is wrong with the check itself is one. A file system
# that all nodes share would fail on all of them at once: it is left out here, and seen by each job's own agents.
reason=$(unbroken check --slurm health --skip 'mount_*' --node-name "$node" 2>/dev/null | head -n 1)
wait
case "$reason" in unbroken:*) ;; *) exit 0 ;; esac

# Read again just before writing. %T: state, %E: reason ("none" without one).
IFS='|' read -r state standing < <(timeout 10 sinfo --all --noheader --Node --nodes="$node" --format='%T|%E')
case "$state" in '' | drain*) exit 0 ;; esac
case "$standing" in none | unbroken:*) ;; *) exit 0 ;; esac

timeout 10 scontrol update NodeName="$node" State=DRAIN Reason="${reason:0:200}"
exit 0
