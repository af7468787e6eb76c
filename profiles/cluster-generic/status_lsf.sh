#!/bin/sh
# Prints the state of an LSF job: running, success or failed. Not run on a real LSF.
found=$(bjobs -noheader -o stat "$1" 2>&1) || found=unanswered
case $found in
  DONE) echo success ;;
  EXIT | ZOMBI | *"is not found"*) echo failed ;;
  *) echo running ;;
esac
