#!/bin/sh
# Runs inside a container for one session of a task's SSH server (sshd.sh). Plain sh, for images without bash.
# Usage: session.sh ENVIRONMENT WORK_DIR [COMMAND]
# ENVIRONMENT is a named pipe with the same text that enter.sh reads; the session's standard input stays free.
# Without COMMAND, starts an interactive shell.
# shellcheck disable=SC1090,SC2154

_sluice_shell=$(command -v bash || command -v sh)
. "$1"
[ -z "${_sluice_bin-}" ] || export PATH="$_sluice_bin:$PATH"
if ! cd "$2"; then
  echo "sluice: the working directory $2 is not there" >&2
  exit 207
fi
if [ "${3-}" = sluice-sftp ]; then # sftp, and scp since OpenSSH 9.0
  for _sluice_place in /usr/lib/openssh /usr/libexec/openssh /usr/lib/ssh /usr/libexec; do
    [ ! -x "$_sluice_place/sftp-server" ] || exec "$_sluice_place/sftp-server"
  done
  echo "sluice: this image has no sftp-server" >&2
  exit 127
fi
[ $# -lt 3 ] || exec "$_sluice_shell" -c "$3"
[ ! -t 0 ] || echo "sluice: this is a further container with the image, mounts and variables of the task."
exec "$_sluice_shell"
