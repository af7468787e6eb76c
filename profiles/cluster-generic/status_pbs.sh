#!/bin/sh
# Prints the state of a PBS Professional or OpenPBS job: running, success or failed. Not run on a
# real PBS.
# Finished jobs are known only where the server keeps its history (job_history_enable).
found=$(qstat -x -f "$1" 2>&1) || {
  case $found in
    *"Unknown Job"*) echo failed ;;
    *) echo running ;;  # the server did not answer: ask again later
  esac
  exit 0
}
field() { printf '%s\n' "$found" | sed -n "s/^ *$1 = //p"; }
case $(field job_state) in
  F | C) if [ "$(field Exit_status)" = 0 ]; then echo success; else echo failed; fi ;;
  *) echo running ;;
esac
