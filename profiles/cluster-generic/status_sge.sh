#!/bin/sh
# Prints the state of a Grid Engine job: running, success or failed. Not run on a real Grid Engine.
# A job that left the queue is looked up in the accounting records, which may lag by seconds.
if qstat -j "$1" > /dev/null 2>&1; then
  echo running
  exit 0
fi
found=$(qacct -j "$1" 2> /dev/null) || found=
field() { printf '%s\n' "$found" | sed -n "s/^$1  *\([0-9]*\).*/\1/p" | tail -1; }
case $(field failed):$(field exit_status) in
  0:0) echo success ;;
  :*) echo running ;;
  *) echo failed ;;
esac
