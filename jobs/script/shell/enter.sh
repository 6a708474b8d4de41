#!/bin/sh
# Inside the container: sets the task's variables and runs its commands. Plain sh, for small images.
# Usage: enter.sh ATTEMPT_DIR RUN_DIR ROLE TASK
# shellcheck disable=SC1090,SC1091,SC2154  # the files are made for each job; one of them sets _sluice_work

_sluice_dir=$1 _sluice_run=$2 _sluice_role=$3 _sluice_task=$4
# Found before the job's own PATH is set.
_sluice_shell=$(command -v bash || command -v sh)
# The log is the task's: what this shell itself says ("Terminated") stays out of it.
exec 3>&2 2>/dev/null

. "$_sluice_run/$_sluice_task.sh"
. "$_sluice_run/peers.sh"
. "$_sluice_dir/env/$_sluice_role.sh"

if ! cd "$_sluice_work"; then
  echo "sluice: the working directory $_sluice_work is not there" >&3
  exit 207
fi

# SIGTERM reaches every process of the task. This shell only waits; the one that runs the commands lets
# the program of the moment finish what it does about it, and then ends, unless the job traps it itself.
trap : TERM
for _sluice_part in pre command post; do
  if [ -e "$_sluice_dir/command/$_sluice_role.$_sluice_part.sh" ]; then
    # shellcheck disable=SC2016  # $0 is the file
    "$_sluice_shell" -c 'trap "exit 143" TERM; . "$0"' \
      "$_sluice_dir/command/$_sluice_role.$_sluice_part.sh" 2>&3 3>&- || exit
  fi
done
