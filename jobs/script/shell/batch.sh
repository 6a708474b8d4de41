# ---- How the job runs -----------------------------------------------------------------------
# Starts one step per role; srun runs task.sh once per task. Every task reports "ready" with its address
# and ports. When all have, this script writes them to the file peers.INCARNATION and tells the tasks to
# go. Reports travel through srun's standard output, so nothing polls a shared file system. The first
# completion rule that holds decides the job's verdict and the exit code of this script.

set -u
umask 077
incarnation=${SLURM_RESTART_COUNT:-0} # a requeued job runs again in the same directory
task_count=0
ready_tasks=0 ended_tasks=0 live_steps=0 started=0 stopping=0 stop_requested=0 time_limit_near=0
partial_line='' verdict='' job_exit=0 deciding_role='' deciding_index=''
declare -A address ports host task_ended
declare -a failed succeeded ended_in_role step_id step_live go_pipe

log_message() { printf '%(%F %T)T  %s\n' -1 "$*"; }
now() { printf '%s' "${EPOCHREALTIME:-$(date +%s)}"; }

# write_atomically FILE: replaces the file by standard input; readers see the old file or the new one.
write_atomically() { cat >"$1.new" && mv -f "$1.new" "$1"; }

# write_task_state ROLE INDEX KEY=VALUE…: writes the state file of a task that cannot do so itself.
write_task_state() {
  local name=${role_names[$1]}-$2
  {
    printf 'role=%s\nindex=%s\nincarnation=%s\n' "${role_names[$1]}" "$2" "$incarnation"
    printf 'host=%s\nip=%s\n' "${host[$1.$2]-}" "${address[$1.$2]-}"
    printf '%s\n' "${@:3}"
  } | write_atomically "tasks/$name.state"
}

# decide VERDICT RULE ROLE INDEX EXIT_CODE REASON: sets and writes the verdict. Only the first call has an effect.
decide() {
  [[ -z $verdict ]] || return 0
  verdict=$1 job_exit=$5
  local rule=$2 role=''
  ((time_limit_near)) && [[ $1 == failed ]] && rule=time_limit
  [[ -n $3 ]] && role=${role_names[$3]}
  printf 'verdict=%s\nrule=%s\nrole=%s\nindex=%s\nexit_code=%s\nreason=%s\nincarnation=%s\nended=%s\n' \
    "$verdict" "$rule" "$role" "$4" "$5" "$6" "$incarnation" "$(now)" | write_atomically verdict
  log_message "$verdict: $rule ${role:+$role-$4 }exit code $5 ${6:+($6)}"
  deciding_role=$3 deciding_index=$4
}

prepare() {
  cd "$attempt_dir" || exit "$exit_start_failed"
  mkdir -p logs tasks work
  rm -f tasks/*.state peers.* verdict release
  pipes=$(mktemp -d "${TMPDIR:-/tmp}/sluice.XXXXXXXX") || exit "$exit_start_failed"
  mkfifo "$pipes/events"
  exec {events}<>"$pipes/events"
  # Slurm signals a whole process tree (proctrack/linuxproc) or only this shell (proctrack/cgroup,
  # scancel --batch). If the canary process is dead after a signal, Slurm has signalled the tasks, too.
  sleep infinity &
  canary=$!
  disown "$canary"
  trap 'rm -rf "$pipes"; kill "$canary" 2>/dev/null' EXIT
  trap 'stopping=1' TERM                  # from Slurm: cancelled, preempted, requeued, time limit
  trap 'stopping=1 stop_requested=1' USR2 # a requested stop: scancel --batch --signal=USR2
  trap 'time_limit_near=1' USR1           # from Slurm (--signal), before the time limit
  local name r
  # Each srun gets all its options as arguments; sbatch's variables would add to them.
  for name in "${!SLURM_@}"; do
    case $name in
      SLURM_GPU* | SLURM_TRES* | SLURM_MEM_PER* | SLURM_CPUS_PER_TASK* | SLURM_NTASKS* | SLURM_NPROCS* | \
        SLURM_EXPORT_ENV | SLURM_GET_USER_ENV | SLURM_DISTRIBUTION) unset "$name" ;;
    esac
  done
  for r in "${!role_names[@]}"; do
    failed[r]=0 succeeded[r]=0 ended_in_role[r]=0 step_id[r]='' step_live[r]=0
    ((task_count += role_tasks[r]))
  done
}

# fail_start EXIT_CODE REASON MESSAGE [ROLE]: writes the message to the tasks' logs and fails the job.
fail_start() {
  local r i
  for r in "${!role_names[@]}"; do
    [[ -z ${4-} || $r == "$4" ]] || continue
    for ((i = 0; i < role_tasks[r]; i++)); do
      printf 'sluice: %s\n' "$3" >>"logs/${role_names[r]}-$i.log"
      write_task_state "$r" "$i" state=ended "exit_code=$1" "reason=$2" "ended=$(now)"
    done
  done
  decide failed start "${4-}" "${4:+0}" "$1" "$2"
}

# Creates created_dirs; fails the job if one of required_dirs does not exist.
check_directories() {
  local dir
  for dir in "${created_dirs[@]}"; do
    mkdir -p -- "$dir" || fail_start "$exit_mount_missing" mount_missing "cannot make the directory $dir"
  done
  for dir in "${required_dirs[@]}"; do
    [[ -e $dir ]] || fail_start "$exit_mount_missing" mount_missing "there is no $dir on the cluster"
  done
}

# load_image_login SOURCE: exports user name and password for a registry, from authFile or roles.sh.
load_image_login() {
  local user='' password='' i image_logins=()
  if [[ -n $auth_file ]]; then # OpenPAI's format: registry, user name and password, one per line
    { read -r _ && read -r user && read -r password; } <"$auth_file" || return
  fi
  if ((has_image_logins)); then
    # shellcheck source=/dev/null
    . "$attempt_dir/roles.sh" || return
    for ((i = 0; i < ${#image_logins[@]}; i += 3)); do
      [[ ${image_logins[i]} != "$1" ]] || user=${image_logins[i + 1]} password=${image_logins[i + 2]}
    done
  fi
  [[ -n $user$password ]] || return 0
  export APPTAINER_DOCKER_USERNAME=$user APPTAINER_DOCKER_PASSWORD=$password
  export SINGULARITY_DOCKER_USERNAME=$user SINGULARITY_DOCKER_PASSWORD=$password
}

# fetch_image SOURCE FILE: fetches an image under a lock, since other jobs may need the same file.
fetch_image() {
  mkdir -p "${2%/*}"
  (
    load_image_login "$1" || exit
    flock 9
    [[ -e $2 ]] || { "${fetch_command[@]}" "$2.$SLURM_JOB_ID" "$1" && mv "$2.$SLURM_JOB_ID" "$2"; }
  ) 9>"$2.lock"
}

# Images are files that must exist, or are fetched into the owner's cache.
check_images() {
  local r i
  for r in "${!role_names[@]}"; do
    [[ -z $verdict && -n ${image_files[r]} && ! -e ${image_files[r]} ]] || continue
    if [[ -z ${image_sources[r]} ]]; then
      fail_start "$exit_image_missing" image_missing "there is no container image ${image_files[r]}" "$r"
      continue
    fi
    for ((i = 0; i < role_tasks[r]; i++)); do write_task_state "$r" "$i" state=pulling "image=${image_sources[r]}"; done
    log_message "fetching ${image_sources[r]}"
    # In the background: bash runs traps only after a foreground command has ended.
    { fetch_image "${image_sources[r]}" "${image_files[r]}" 2>&1 | tee "$pipes/fetch.log"; } &
    while ((!stopping)) && kill -0 "$!" 2>/dev/null; do wait "$!"; done
    if ((stopping)); then
      decide stopped stop '' '' "$exit_stopped" stopped
      return
    fi
    [[ -e ${image_files[r]} ]] && continue
    if grep -qiE 'manifest unknown|not found|name unknown|denied|unauthorized|invalid reference' "$pipes/fetch.log"; then
      fail_start "$exit_image_missing" image_missing "there is no container image ${image_sources[r]}" "$r"
    else
      fail_start "$exit_image_failed" image_failed "the container image ${image_sources[r]} could not be fetched" "$r"
    fi
  done
}

# A controller that hangs may create a role's step although its reply is lost. srun (22.05) repeats the
# request after a minute, gets "resources are busy" (because of that unused step, which scancel does not
# remove), and repeats until the time limit. No task has run, so srun is killed here and started again.
no_reply='step creation (temporarily|still) disabled, retrying \((Socket timed out|Zero Bytes|Requested nodes are busy)'

# watch_srun ROLE: copies srun's messages, and kills srun if it waits for a step because of a lost reply.
watch_srun() {
  local line status read_timeout=()
  while :; do
    line='' status=0
    IFS= read -r "${read_timeout[@]}" line || status=$?
    if [[ -n $line ]]; then
      printf '%s\n' "$line" >>"$pipes/srun.$1"
      printf '%s\n' "$line" >&2
    fi
    read_timeout=()
    if ((status > 128)); then # no "Step created" has followed
      : >"$pipes/no_reply.$1"
      kill "$(<"$pipes/srun_pid.$1")"
    elif ((status)); then
      return
    elif [[ $line =~ $no_reply ]]; then
      read_timeout=(-t 5)
    fi
  done
}

# reply_was_lost ROLE: srun got no step, but Slurm may have created one.
reply_was_lost() {
  [[ -e $pipes/no_reply.$1 ]] || grep -qE 'Unable to create step for job [0-9]+: (Socket timed out|Zero Bytes)' "$pipes/srun.$1"
}

# controller_was_unreachable ROLE: srun created no step because slurmctld did not reply (22.05).
controller_was_unreachable() {
  grep -qE -e 'Unable to (confirm allocation|create step) for job [0-9]+: Unable to contact slurm controller' \
    -e 'Unable to confirm allocation for job [0-9]+: (Socket timed out|Zero Bytes)' "$pipes/srun.$1"
}

# has_own_allocation ROLE: true if no other role shares the role's allocation.
has_own_allocation() {
  local r
  for r in "${!role_groups[@]}"; do
    [[ $r == "$1" || ${role_groups[r]} != "${role_groups[$1]}" ]] || return 1
  done
}

# start_step ROLE: runs srun; again for up to ten minutes if the controller does not reply.
start_step() {
  trap : TERM USR1 USR2 # only the parent handles them
  local options code reason='' lost=0 deadline=$((SECONDS + 600))
  step_options "$1"
  while :; do
    code=0
    rm -f "$pipes/no_reply.$1"
    : >"$pipes/srun.$1"
    # shellcheck disable=SC2154  # options is set by step_options
    (
      printf '%s' "$BASHPID" >"$pipes/srun_pid.$1"
      exec srun "${options[@]}" --export=ALL --input=all --kill-on-bad-exit=0 --wait=0 --job-name="${role_names[$1]}" \
        /bin/bash "$attempt_dir/task.sh" "$attempt_dir" "$1" "$incarnation"
    ) <"$pipes/go.$1" >"$pipes/events" 2> >(watch_srun "$1") || code=$?
    ((code && SECONDS < deadline)) || break
    sleep 0.2 # until watch_srun has written the last messages
    [[ ! -e $pipes/decided ]] || break
    if reply_was_lost "$1"; then
      if has_own_allocation "$1"; then
        # Overlap with the unused step. It holds the memory, too; --mem=0 is all memory of the job.
        options=("${options[@]/#--mem*/--mem=0}" --overlap)
      elif ((lost++)); then
        code=$exit_launch_failed reason=launch_failed # an overlapping step would use another role's resources
        break
      fi
    elif ! controller_was_unreachable "$1"; then
      break
    fi
    log_message "Slurm's controller does not reply: starting role ${role_names[$1]} again in 3 s"
    sleep 3
  done
  printf 'step %s %s %s\n' "$1" "$code" "$reason" >"$pipes/events"
}

start_steps() {
  local r pipe
  for r in "${!role_names[@]}"; do
    mkfifo "$pipes/go.$r"
    exec {pipe}<>"$pipes/go.$r"
    go_pipe[r]=$pipe
    start_step "$r" &
    step_live[r]=1
    ((live_steps += 1))
  done
}

# end_steps: sends SIGTERM to every running task; task.sh sends SIGKILL after the grace period.
end_steps() {
  local r
  for r in "${!role_names[@]}"; do
    ((step_live[r] && ended_in_role[r] < role_tasks[r])) && [[ -n ${step_id[r]} ]] || continue
    scancel --quiet --signal=TERM "$(slurm_job_of "$r").${step_id[r]}"
  done
}

# slurm_job_of ROLE: prints the Slurm job of the role's step; each component of a het job has its own id.
slurm_job_of() {
  local name=SLURM_JOB_ID_HET_GROUP_${role_groups[$1]}
  printf '%s' "${!name:-$SLURM_JOB_ID}"
}

# print_peers: one line per task: role, index, host, address, ports.
print_peers() {
  local r i
  for r in "${!role_names[@]}"; do
    for ((i = 0; i < role_tasks[r]; i++)); do
      printf '%s %s %s %s %s\n' "${role_names[r]}" "$i" "${host[$r.$i]}" "${address[$r.$i]}" "${ports[$r.$i]}"
    done
  done
}

on_ready() { # ROLE INDEX STEP HOST ADDRESS PORTS
  step_id[$1]=$3 host[$1.$2]=$4 address[$1.$2]=$5 ports[$1.$2]=$6
  ((ready_tasks += 1))
  ((ready_tasks == task_count)) || return 0
  if ! print_peers | write_atomically "peers.$incarnation"; then
    fail_start "$exit_start_failed" start_failed "the addresses of the tasks could not be written to $attempt_dir"
    return
  fi
  started=1
  local r
  for r in "${!role_names[@]}"; do printf 'go\n' >&"${go_pipe[r]}"; done
  log_message "all $task_count tasks are ready and start"
}

on_ended() { # ROLE INDEX EXIT_CODE REASON
  [[ -z ${task_ended[$1.$2]-} ]] || return 0
  task_ended[$1.$2]=1
  ((ended_tasks += 1, ended_in_role[$1] += 1))
  if (($3 == 0)); then ((succeeded[$1] += 1)); else ((failed[$1] += 1)); fi
  if [[ $4 == stopped ]] && ((!time_limit_near)); then
    decide stopped stop '' '' "$exit_stopped" stopped # not by this script: scancel
  elif ((!started)); then
    decide failed start "$@"
  elif ((min_failed[$1] && failed[$1] >= min_failed[$1])); then
    decide failed min_failed "$@"
  elif ((min_succeeded[$1] && succeeded[$1] >= min_succeeded[$1])); then
    decide completed min_succeeded "$1" "$2" 0 ''
  elif ((main_role[$1] && ended_in_role[$1] == role_tasks[$1])); then
    decide completed main_role "$1" "$2" 0 ''
  elif ((ended_tasks == task_count)); then
    decide completed all_ended '' '' 0 ''
  fi
}

# ran_out_of_memory ROLE: Slurm reports this only in srun's messages at the end of the step.
ran_out_of_memory() {
  grep -qiE 'exceeded .*memory limit|oom[-_ ]?kill|out[-_ ]of[-_ ]memory' "$pipes/srun.$1"
}

# If the deciding task was killed with SIGKILL, srun's messages tell whether memory was the reason.
mark_out_of_memory() {
  [[ $verdict == failed && -n $deciding_role ]] && ((job_exit == 137)) || return 0
  ran_out_of_memory "$deciding_role" || return 0
  local file
  for file in verdict "tasks/${role_names[deciding_role]}-$deciding_index.state"; do
    sed 's/^reason=$/reason=out_of_memory/' "$file" | write_atomically "$file"
  done
}

on_step() { # ROLE EXIT_CODE [REASON]: srun has ended; tasks without a report or final state are lost
  local i code reason file key value
  step_live[$1]=0
  ((live_steps -= 1))
  for ((i = 0; i < role_tasks[$1]; i++)); do
    [[ -z ${task_ended[$1.$i]-} ]] || continue
    file=tasks/${role_names[$1]}-$i.state code='' reason=''
    if grep -qs '^state=ended$' "$file"; then # it ended; only its report was lost
      while IFS='=' read -r key value; do
        case $key in exit_code) code=$value ;; reason) reason=$value ;; esac
      done <"$file"
    fi
    if [[ -z $code ]]; then
      code=$2 reason=${3:-lost}
      ((code)) || code=$exit_task_lost
      ran_out_of_memory "$1" && reason=out_of_memory
      write_task_state "$1" "$i" state=ended "exit_code=$code" "reason=$reason" "ended=$(now)"
    fi
    on_ended "$1" "$i" "$code" "$reason"
  done
}

# next_event: handles one report, or returns after one second without any.
next_event() {
  local line kind a b c d e f
  if ! IFS= read -r -t 1 -u "$events" line; then
    partial_line+=$line # the timeout may split a line
    return 0
  fi
  read -r kind a b c d e f <<<"$partial_line$line"
  partial_line=''
  case $kind in
    ready) on_ready "$a" "$b" "$c" "$d" "$e" "$f" ;;
    ended) on_ended "$a" "$b" "$c" "$d" ;;
    step) on_step "$a" "$b" "$c" ;;
  esac
}

# wait_for_steps SECONDS: waits until all steps have ended, at most this long.
wait_for_steps() {
  local deadline=$((SECONDS + $1))
  while ((live_steps > 0 && SECONDS < deadline)); do next_event; done
}

supervise() {
  local warned=0
  while [[ -z $verdict ]]; do
    next_event
    if ((time_limit_near && !warned)); then
      warned=1
      log_message "the time limit is near: sending SIGTERM to the tasks"
      end_steps
    fi
    ((stopping)) && decide stopped stop '' '' "$exit_stopped" stopped
  done
}

finish() {
  local signalled_by_slurm=0
  : >"$pipes/decided"
  if ((stopping)); then
    sleep 0.3 # Slurm signals the processes one after another
    kill -0 "$canary" 2>/dev/null || signalled_by_slurm=1
  fi
  ((live_steps == 0 || signalled_by_slurm)) || end_steps
  wait_for_steps $((grace_s + 10))
  mark_out_of_memory
  # Slurm should record CANCELLED or TIMEOUT, which only it can set: cancel the job, or wait for the limit.
  # Not after SIGTERM: Slurm has decided then, and scancel would undo a requeue.
  if ((stop_requested)); then
    scancel --quiet "$SLURM_JOB_ID"
    sleep 30 &
    wait "$!"
  elif [[ $verdict == failed ]] && ((time_limit_near)); then
    sleep "$((grace_s + 90))" &
    wait "$!"
  fi
  exit "$job_exit"
}

prepare
check_directories
[[ -n $verdict ]] || check_images
[[ -n $verdict ]] || start_steps
supervise
finish
