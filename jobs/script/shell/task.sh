# ---- How a task runs ------------------------------------------------------------------------
# srun starts this once per task. It finds the node's address and free ports, reports ready on its
# standard output (which srun carries to the batch script), waits for "go" on its standard input,
# runs the task with its output going straight to the task's log, and reports its end.

set -u
umask 077
role=$1 run_dir=$2
index=${SLURM_PROCID:?}
incarnation=${run_dir##*/}
role_settings "$role"
# shellcheck disable=SC2154  # role_name, image_file and the ports are set by role_settings
name=$role_name-$index
log=$attempt_dir/logs/$name.log
state_file=$attempt_dir/tasks/$name.state
node=${SLURMD_NODENAME:-$(hostname)}
task_ports=() ip='' state=starting started='' ended='' exit_code='' signal='' reason=''
task_pid='' kill_timer='' stopping=0 interrupted=0
log_offset=$(stat -c %s -- "$log" 2>/dev/null || printf 0)

now() { printf '%s' "${EPOCHREALTIME:-$(date +%s)}"; }
quote() { printf "'%s'" "${1//\'/\'\\\'\'}"; }

write_state() {
  {
    printf 'role=%s\nindex=%s\nincarnation=%s\nstate=%s\n' "$role_name" "$index" "$incarnation" "$state"
    printf 'host=%s\nip=%s\nports=%s\ngpus=%s\n' "$node" "$ip" "$(format_ports)" "${CUDA_VISIBLE_DEVICES-}"
    printf 'step=%s\npid=%s\nlog_offset=%s\n' "${SLURM_STEP_ID-}" "$task_pid" "$log_offset"
    printf 'started=%s\nended=%s\nexit_code=%s\nsignal=%s\nreason=%s\n' "$started" "$ended" "$exit_code" "$signal" "$reason"
  } >"$state_file.new" && mv -f "$state_file.new" "$state_file"
}

format_ports() {
  local i
  for i in "${!task_ports[@]}"; do printf '%s:%s;' "${port_labels[i]}" "${task_ports[i]}"; done
}

# finish_task EXIT_CODE REASON: the task's end, for the state file, the batch script and srun.
finish_task() {
  exit_code=$1 reason=$2 state=ended ended=$(now)
  ((exit_code > 128 && exit_code < 193)) && signal=$((exit_code - 128))
  [[ -z $kill_timer ]] || kill -KILL "$kill_timer" 2>/dev/null
  [[ -z ${canary-} ]] || kill -KILL "$canary" 2>/dev/null
  write_state
  printf 'ended %s %s %s %s\n' "$role" "$index" "$exit_code" "$reason"
  exit "$exit_code"
}

# The address under which other nodes know this one: the node's own name, or what Slurm itself uses.
find_address() {
  local fields node_info
  read -ra fields <<<"$(getent ahostsv4 "$node" 2>/dev/null)"
  ip=${fields[0]-}
  if [[ -z $ip || $ip == 127.* ]]; then
    node_info=$(scontrol show node -o "$node" 2>/dev/null)
    [[ $node_info =~ NodeAddr=([^[:space:]]+) ]] && read -ra fields <<<"$(getent ahostsv4 "${BASH_REMATCH[1]}" 2>/dev/null)"
    ip=${fields[0]-}
  fi
  if [[ -z $ip ]]; then
    read -ra fields <<<"$(hostname -I 2>/dev/null)"
    ip=${fields[0]:-127.0.0.1}
  fi
}

declare -A port_taken
read_used_ports() {
  local local_address rest
  while read -r _ local_address rest; do
    [[ $local_address == *:* ]] && port_taken[$((16#${local_address##*:}))]=1
  done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
}

# Each task of the job looks in its own slice of the range, so no two of them can choose the same port.
pick_ports() {
  local i n port span=$((port_high - port_low + 1))
  local next=$(((SLURM_JOB_ID * 7919 + (first_task + index) * ports_per_task) % span)) tried=0 run
  read_used_ports
  for i in "${!port_labels[@]}"; do
    run=''
    for ((n = 0; n < port_counts[i]; n++)); do
      if ((port_begins[i])); then
        port=$((port_begins[i] + n))
        if [[ -n ${port_taken[$port]-} ]]; then
          printf 'sluice: port %s is already in use on %s\n' "$port" "$node" >>"$log"
          finish_task "$exit_port_taken" port_taken
        fi
      else
        while :; do
          port=$((port_low + next))
          ((next = (next + 1) % span, tried += 1))
          [[ -n ${port_taken[$port]-} ]] || break
          ((tried < span)) || finish_task "$exit_port_taken" port_taken
        done
      fi
      run+=${run:+,}$port
    done
    task_ports[i]=$run
  done
}

# What enter.sh needs to know of this task, for runtimes that start from an empty environment.
write_task_environment() {
  local i variable
  {
    printf '_sluice_index=%s\n_sluice_ip=%s\n_sluice_work=%s\n' "$index" "$(quote "$ip")" "$(quote "$work_dir")"
    for i in "${!task_ports[@]}"; do printf '_sluice_port_%s=%s\n' "$i" "${task_ports[i]}"; done
    for variable in $(compgen -e); do
      case $variable in
        USER | LOGNAME | TZ | SLURM_* | SLURMD_* | CUDA_VISIBLE_DEVICES | ROCR_VISIBLE_DEVICES | ZE_AFFINITY_MASK | GPU_DEVICE_ORDINAL | \
          NVIDIA_VISIBLE_DEVICES | PMI_* | PMI2_* | PMIX_*) printf 'export %s=%s\n' "$variable" "$(quote "${!variable}")" ;;
      esac
    done
  } >"$run_dir/$name.sh"
}

wait_for_go() {
  local part status answer=''
  while :; do
    IFS= read -r -t 2 part
    status=$?
    answer+=$part # two seconds may be over in the middle of the word
    ((stopping)) && finish_task "$exit_stopped" stopped
    ((status > 128)) && continue
    [[ $status == 0 && $answer == go ]] && return
    finish_task "$exit_stopped" lost
  done
}

# Slurm may signal every process of the step (proctrack/linuxproc) or this one alone (proctrack/cgroup).
# The canary tells: while it lives, the task has not got the signal and gets it from here.
# shellcheck disable=SC2329  # the trap calls it
on_term() {
  interrupted=1
  ((stopping)) && return
  stopping=1
  [[ -n $task_pid ]] || return
  sleep 0.3
  kill -0 "$canary" 2>/dev/null && kill -TERM -- "-$task_pid" 2>/dev/null
  (
    trap '' TERM
    sleep "$grace_s"
    kill -KILL -- "-$task_pid"
  ) >/dev/null 2>&1 &
  kill_timer=$!
  disown "$kill_timer"
}

run_task() {
  local argv=() enter=(/bin/sh "$attempt_dir/enter.sh" "$attempt_dir" "$run_dir" "$role" "$name")
  ((role_gpus)) || export CUDA_VISIBLE_DEVICES=
  container_argv # puts the container runtime before enter.sh
  write_task_environment
  set -m # a process group of its own for the task, so that signals reach all of it
  "${argv[@]}" "${enter[@]}" </dev/null >>"$log" 2>&1 &
  task_pid=$!
  sleep infinity >/dev/null 2>&1 &
  canary=$!
  disown "$canary"
  set +m
  state=running started=$(now)
  write_state
  while
    wait "$task_pid"
    exit_code=$?
    ((interrupted))
  do interrupted=0; done
  kill -KILL -- "-$task_pid" 2>/dev/null # whatever the task left behind
}

# isDebug: a failed task keeps its node until it is stopped or a file named "release" appears.
hold_for_debugging() {
  state=debug
  write_state
  until ((stopping)) || [[ -e $attempt_dir/release ]]; do sleep 2; done
}

trap on_term TERM
mkdir -p "$run_dir" # the batch script made it; this only refreshes what this node knows of it
find_address
pick_ports
write_state
printf 'ready %s %s %s %s %s %s\n' "$role" "$index" "${SLURM_STEP_ID-}" "$node" "$ip" "$(
  IFS=';'
  printf '%s' "${task_ports[*]}"
)"
wait_for_go
run_task
if ((stopping)); then
  ((exit_code)) && finish_task "$exit_code" stopped
elif ((exit_code)); then
  ((is_debug)) && hold_for_debugging
fi
finish_task "$exit_code" ''
