#!/bin/sh
# Runs inside the container: sets the task's variables and runs its commands. Plain sh, for images without bash.
# Usage: enter.sh WORK_DIR <ENVIRONMENT
# ENVIRONMENT is text that task.sh writes: lines of sh that export the task's variables and set _sluice_pre,
# _sluice_command and _sluice_post, the commands to run.
# shellcheck disable=SC1091,SC2154

_sluice_work=$1
# Find the shell before the job's own PATH is set; without a process, which $(command -v bash) would be.
_sluice_shell=/bin/sh
IFS=:
for _sluice_place in $PATH; do
  [ ! -x "$_sluice_place/bash" ] || { _sluice_shell=$_sluice_place/bash && break; }
done
unset IFS _sluice_place
# Drop messages of this shell such as "Terminated": the log is for the task's output. File descriptor 3 is the log.
exec 3>&2 2>/dev/null

. /dev/fd/0
exec </dev/null

if ! cd "$_sluice_work"; then
  echo "sluice: the working directory $_sluice_work is not there" >&3
  exit 207
fi

# Jobs with SSH between their tasks: the directory has an ssh that knows the names, ports and keys of the tasks.
if [ -n "${_sluice_bin-}" ]; then
  command -v ssh >/dev/null || echo "sluice: this image has no ssh client: ssh to other tasks does not work in this task" >&3
  export PATH="$_sluice_bin:$PATH"
fi

# run_server: starts the server by which the tasks of a framework find each other, in the first task; waits for it in others.
run_server() {
  case $_sluice_server in
    *horovod | *xgboost)
      _sluice_python=$(command -v python3 || command -v python)
      if ! _sluice_server_pid=$("${_sluice_python:-python3}" "${0%/*}/framework_server.py" "$_sluice_server" 2>&3 3>&-); then
        echo "sluice: the server of ${_sluice_server#wait-} is not available in the container of this task or of the first task" >&3
        return 209
      fi
      ;;
    mindspore) # the scheduler is the job's own program in another part; workers wait for it by themselves
      MS_ROLE=MS_SCHED "$_sluice_shell" -c '. /dev/fd/4' command >&3 2>&3 3>&- 4<<END_OF_COMMAND &
exec 4<&-; $_sluice_command
END_OF_COMMAND
      _sluice_server_pid=$!
      ;;
  esac
  [ -z "${_sluice_server_pid-}" ] || trap 'kill -KILL "$_sluice_server_pid"' EXIT
}

# run_text TEXT: runs commands of the job in a shell of their own.
run_text() {
  [ -n "$1" ] || return 0
  "$_sluice_shell" -c 'trap "exit 143" TERM; . /dev/fd/4' command 2>&3 3>&- 4<<END_OF_COMMAND
exec 4<&-; $1
END_OF_COMMAND
}

# Every process of the task gets SIGTERM. This shell ignores it and waits for the shell that runs the commands.
# That shell waits until the current program has handled the signal and then exits with 143, unless the
# job's commands set a trap of their own.
trap : TERM
run_text "$_sluice_pre" || exit
run_server || exit
run_text "$_sluice_command" || exit
run_text "$_sluice_post" || exit
