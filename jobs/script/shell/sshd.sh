# The SSH server of one task. Sourced by task.sh if ssh_mode is "required" or "optional"; defines functions only.
#
# What it guarantees:
# - The server runs as the job's owner, on the task's port "ssh", from before the task reports "ready" until the task
#   ends. So the servers of all tasks listen before the first command of the job starts.
# - Only the key pair of this run of the job (ssh/ in the attempt's directory, made by batch.sh, mode 0700) opens it. It
#   has no passwords, no PAM and no keys of the person. Other users of the node can connect, but not log in.
# - Every session, with or without a command, runs session.sh in a further container that has the argv, mounts, variables
#   and GPUs of the task. Joining the task's own container is not possible with a setuid Apptainer. Under Pyxis, and
#   without a container runtime, this script is already where the task is, and the image or node needs sshd.
# - Values of secrets reach a session through a named pipe, not through files or arguments.
# - Sessions get SIGTERM with the task. When the task ends, its server and all processes of its sessions are killed,
#   also those in the background: processes of sessions are found by a variable in their environment.
#
# What it uses of task.sh: attempt_dir, step_roles, restart_count, task_dir, log, node, argv, environment, peer_ip,
# peer_ports, and the functions variable, assign, read_peers, build_environment, exec_container, finish_task.
# To let further keys in (such as certificates of a CA for a service's owner), add lines to write_sshd_config.
# Forwarding to TCP ports and unix sockets of the node is allowed: a session could do the same.
# shellcheck shell=bash disable=SC2154,SC2034  # task.sh and roles.sh set and use variables

sshd_pid=''

# fail_ssh MESSAGE: fails the task, or only writes the message to its log if the job can do without SSH.
fail_ssh() {
  local mode=$ssh_mode
  printf 'sluice: jobssh: %s\n' "$1" >>"$log"
  stop_sshd
  ssh_mode=off
  [[ $mode == optional ]] || finish_task "$exit_ssh_failed" ssh_failed
}

# own_port LABEL: prints the task's first port with this label.
own_port() {
  local i
  for i in "${!port_labels[@]}"; do
    [[ ${port_labels[i]} != "$1" ]] || printf '%s' "${task_ports[i]%%,*}"
  done
}

write_sshd_config() {
  printf '%s\n' "Port $1" 'AddressFamily any' "HostKey $task_dir/host_key" "AuthorizedKeysFile $task_dir/user_key.pub" \
    "ForceCommand /bin/bash $task_dir/session" 'PidFile none' 'UsePAM no' 'StrictModes no' 'AuthenticationMethods publickey' \
    'PasswordAuthentication no' 'PermitUserEnvironment no' 'PermitUserRC no' 'X11Forwarding no' 'PermitTunnel no' \
    'AllowTcpForwarding local' 'AllowStreamLocalForwarding local' 'PrintMotd no' 'UseDNS no' 'LoginGraceTime 30' \
    'MaxStartups 200' 'MaxSessions 200' 'LogLevel ERROR' \
    'Subsystem sftp sluice-sftp' # session.sh runs the image's own
}

# write_session_script: writes the script that the server runs for each session. Sessions wait until the task starts.
write_session_script() {
  printf 'for ((i = 0; i < 600; i++)); do [[ ! -e %q ]] || break; sleep 0.1; done\n' "$task_dir/task.env"
  printf 'exec /bin/bash %q %q %q %q %q\n' "$attempt_dir/task.sh" "$attempt_dir" "$step_roles" "$restart_count" "$task_dir/task.env"
}

# start_sshd: starts the server and waits until it listens.
start_sshd() {
  local program port deadline=$((SECONDS + 20))
  port=$(own_port ssh)
  # sshd needs its absolute path; /usr/sbin is often not in the PATH of a person.
  if ! program=$(PATH=$PATH:/usr/sbin:/usr/local/sbin:/sbin type -P sshd); then
    fail_ssh "there is no sshd on $node; openssh-server must be installed where tasks run"
    return
  fi
  if ! cp "$attempt_dir/ssh/host_key" "$attempt_dir/ssh/user_key.pub" "$task_dir/"; then
    fail_ssh "the job's keys cannot be read on $node"
    return
  fi 2>>"$log"
  write_session_script >"$task_dir/session"
  write_sshd_config "$port" >"$task_dir/sshd_config"
  "$program" -D -e -f "$task_dir/sshd_config" </dev/null >"$task_dir/sshd.log" 2>&1 &
  sshd_pid=$!
  disown "$sshd_pid"
  until { : <"/dev/tcp/127.0.0.1/$port"; } 2>/dev/null || ! kill -0 "$sshd_pid" 2>/dev/null || ((SECONDS >= deadline)); do
    sleep 0.05
  done
  # If another program has the port, the connection succeeds, but sshd ends.
  sleep 0.05
  kill -0 "$sshd_pid" 2>/dev/null || fail_ssh "sshd does not start on $node: $(<"$task_dir/sshd.log")"
}

# signal_sessions SIGNAL: signals all processes of the user that were started in sessions of this server. Fails if there are
# none.
signal_sessions() {
  local file pids=()
  while read -r file; do
    file=${file#/proc/}
    pids+=("${file%/environ}")
  done < <(grep -lsFxz -- "SLUICE_SSH_SESSION=$task_dir" /proc/[0-9]*/environ)
  ((${#pids[@]})) && kill "-$1" "${pids[@]}" 2>/dev/null
}

# kill_with_children PID: kills a process and its descendants. It is stopped first, so that it starts no further ones.
kill_with_children() {
  local child children=()
  kill -STOP "$1" 2>/dev/null || return 0
  read -ra children <"/proc/$1/task/$1/children"
  for child in "${children[@]}"; do kill_with_children "$child"; done
  kill -KILL "$1"
} 2>/dev/null

# stop_sshd: ends the sessions, then the server and its connections. Connections have a second to tell their clients how
# the sessions ended. Repeated, because a session may start a process meanwhile. sshd overwrites its environment with its
# title, so the server is found by its process id; its title contains the path of its configuration.
stop_sshd() {
  local n connections
  [[ -n $task_dir && -n $sshd_pid ]] || return 0
  for ((n = 0; n < 20; n++)); do
    signal_sessions KILL
    connections=''
    read -r connections <"/proc/$sshd_pid/task/$sshd_pid/children"
    [[ -n $connections ]] || break
    sleep 0.05
  done 2>/dev/null
  ! grep -qsaF -- "$task_dir/sshd_config" "/proc/$sshd_pid/cmdline" || kill_with_children "$sshd_pid"
  for ((n = 0; n < 5; n++)); do signal_sessions KILL || break; done
  sshd_pid=''
}

# write_ssh_config: writes what `ssh ROLE-INDEX` needs in the container: a client configuration, and the programs ssh, scp
# and sftp that use it. ssh to a node's address or name reaches the first task on it.
write_ssh_config() {
  local peer_role peer_index peer_node peer_address ports port prefix names user
  local -A known=()
  user=$(id -un)
  mkdir -p "$task_dir/bin"
  while read -r peer_role peer_index peer_node peer_address ports; do
    names='' port=${peer_ports[$peer_role/$peer_index/ssh]%%,*}
    for prefix in ${host_names[$peer_role]}; do names+=" $prefix-$peer_index"; done
    # A role may have no name that can be a host name. "Host" without a name is an error for ssh.
    [[ -z $names ]] || print_ssh_host "$names" "$peer_address" "$port" "$user"
    for prefix in "$peer_node" "$peer_address"; do
      [[ -n ${known[$prefix]-} ]] || print_ssh_host " $prefix" "$peer_address" "$port" "$user"
      known[$prefix]=1
    done
  done <"$attempt_dir/peers.$restart_count" >"$task_dir/ssh_config"
  # Other hosts: the person's own configuration. OpenSSH before 7.3 does not know Include.
  printf 'Host *\n  IgnoreUnknown Include\n  Include ~/.ssh/config\n' >>"$task_dir/ssh_config"
  cat >"$task_dir/bin/ssh" <<END_OF_SCRIPT
#!/bin/sh
# Runs the program of the same name in the image with the names, ports and keys of the tasks.
IFS=:
for place in \$PATH; do
  [ "\$place" = '$task_dir/bin' ] || [ ! -x "\$place/\${0##*/}" ] || exec "\$place/\${0##*/}" -F '$task_dir/ssh_config' "\$@"
done
echo "sluice: this image has no \${0##*/}" >&2
exit 127
END_OF_SCRIPT
  chmod 700 "$task_dir/bin/ssh"
  cp -p "$task_dir/bin/ssh" "$task_dir/bin/scp"
  cp -p "$task_dir/bin/ssh" "$task_dir/bin/sftp"
}

# print_ssh_host NAMES ADDRESS PORT USER: prints the client configuration of one task. All tasks have one host key.
print_ssh_host() {
  local keys=${attempt_dir//%/%%}/ssh
  printf 'Host%s\n  HostName %s\n  Port %s\n  User %s\n  IdentityFile "%s/user_key"\n' "$1" "$2" "$3" "$4" "$keys"
  printf '  UserKnownHostsFile "%s/known_hosts"\n' "$keys"
  printf '  %s\n' 'GlobalKnownHostsFile /dev/null' 'HostKeyAlias sluice-task' 'StrictHostKeyChecking yes' 'IdentitiesOnly yes' \
    'PreferredAuthentications publickey' 'ConnectTimeout 30' 'LogLevel ERROR'
}

# add_ssh_variables: adds to `environment` what enter.sh and session.sh need.
add_ssh_variables() { assign _sluice_bin "$task_dir/bin"; }

# accept_sessions: saves what a session needs to start an equal container.
accept_sessions() {
  { export -p && declare -p argv task_dir; } >"$task_dir/task.env.new" && mv "$task_dir/task.env.new" "$task_dir/task.env"
}

# run_session: runs SSH_ORIGINAL_COMMAND, or a shell, in a container equal to the task's; exits with its code.
run_session() {
  local pipe writer code
  read_peers || exit
  build_environment
  variable SLUICE_SSH_SESSION "$task_dir"
  pipe=$(mktemp -u "$task_dir/environment.XXXXXXXX")
  mkfifo "$pipe" || exit
  printf '%s\n' "${environment[@]}" >"$pipe" &
  writer=$!
  export SLUICE_SSH_SESSION=$task_dir
  (exec_container /bin/sh "$attempt_dir/session.sh" "$pipe" "$work_dir" ${SSH_ORIGINAL_COMMAND+"$SSH_ORIGINAL_COMMAND"})
  code=$?
  kill "$writer" 2>/dev/null
  rm -f "$pipe"
  exit "$code"
}
