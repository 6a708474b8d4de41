#!/bin/bash
# Runs one task of a job. Usage, under srun: task.sh ATTEMPT_DIR ROLE,… RESTART_COUNT
# 1. Finds the node's address and free ports, and reports "ready" on standard output, which srun forwards
#    to the batch script.
# 2. Waits for "go" on standard input. The batch script sends it after it has written the addresses of all
#    tasks to the file peers.RESTART_COUNT. A task that is alone in its job does not wait.
# 3. Starts enter.sh in the role's container with the task's variables. The task's output goes to its log.
# 4. Reports "ended" with the exit code.
# Usage in a session of the task's SSH server (sshd.sh): task.sh ATTEMPT_DIR ROLE,… RESTART_COUNT TASK_DATA
# Runs a command in a further container, equal to the task's.
# roles.sh has the data of the job: settings, arrays, and the functions role_settings, role_variables and
# role_commands. role_variables calls the functions `variable`, `template` and `family` of this file, and the function
# secret_variables of secrets.sh, if there are secrets.
# For a small job, starting processes is most of what this script costs: it starts none where bash can do the work.
# shellcheck disable=SC2154,SC2329  # roles.sh sets variables and calls functions

set -u
umask 077
attempt_dir=${1:?} step_roles=${2:?} restart_count=${3:?} # numbers of the step's roles; Slurm's count of requeues
session_data=${4-}
# shellcheck source=/dev/null
[[ -z $session_data ]] || . "$session_data" || exit # the task's exported variables, argv and task_dir
index=${SLURM_PROCID:?}
# shellcheck source=/dev/null
. "$attempt_dir/roles.sh" || exit
# shellcheck source=/dev/null
((!has_secrets)) || . "$attempt_dir/secrets.sh" || exit
# shellcheck source=/dev/null
[[ $ssh_mode == off ]] || . "$attempt_dir/sshd.sh" || exit
# The ranks of the step are the tasks of its first role, then those of the next: index is the index in the role.
for role in ${step_roles//,/ }; do
  role_settings "$role"
  ((index >= role_tasks)) || break
  ((index -= role_tasks))
done
name=$role_name-$index
log=$attempt_dir/logs/$name.log
state_file=$attempt_dir/tasks/$name.state
node=${SLURMD_NODENAME:-$(hostname)}
task_ports=() ip='' state=starting started='' ended='' exit_code='' signal='' reason=''
task_pid='' reader='' request='' kill_timer='' mount_pid='' mount_dir='' container='' root_lock='' stopping=0 interrupted=0
alone=0 # 1: no other task, and no SSH server that needs the files with the addresses
((task_count > 1)) || [[ $ssh_mode != off ]] || alone=1
task_dir=${task_dir-} # private directory on the node; with SSH, it is in the container at the same path

# ---- Reports ----------------------------------------------------------------------------------

# set_now: sets now to the time in seconds since the epoch; bash has fractions since 5.0.
set_now() {
  now=${EPOCHREALTIME-}
  [[ -n $now ]] || printf -v now '%(%s)T' -1
}

# write_state: adds the task's state to its state file, of which the last complete block counts: a rename would be a process.
write_state() {
  local all_ports
  format_ports
  printf 'begin\nrole=%s\nindex=%s\nrestart_count=%s\nstate=%s\nhost=%s\nip=%s\nports=%s\ngpus=%s\nstep=%s\npid=%s\nlog_offset=%s\nstarted=%s\nended=%s\nexit_code=%s\nsignal=%s\nreason=%s\nend\n' \
    "$role_name" "$index" "$restart_count" "$state" "$node" "$ip" "$all_ports" "${CUDA_VISIBLE_DEVICES-}" "${SLURM_STEP_ID-}" \
    "$task_pid" "$log_offset" "$started" "$ended" "$exit_code" "$signal" "$reason" >>"$state_file"
}

# format_ports: sets all_ports to the task's ports as label:port,port;label:port;
format_ports() {
  local i
  all_ports=''
  for i in "${!task_ports[@]}"; do all_ports+="${port_labels[i]}:${task_ports[i]};"; done
}

# finish_task EXIT_CODE REASON [ERROR]: writes the state file, reports to the batch script and exits. ERROR is the
# message of the program that failed, one line.
finish_task() {
  set_now
  exit_code=$1 reason=$2 state=ended ended=$now
  ((exit_code > 128 && exit_code < 193)) && signal=$((exit_code - 128))
  [[ -z $kill_timer ]] || kill -KILL "$kill_timer" 2>/dev/null
  [[ -z $reader ]] || kill -KILL "$reader" 2>/dev/null
  [[ $ssh_mode == off ]] || stop_sshd
  unmount_image
  [[ -z $task_dir ]] || rm -rf "$task_dir" ${mount_dir:+"$mount_dir"}
  write_state
  printf 'ended %s %s %s %s\n' "$role" "$index" "$exit_code" "$reason${3:+ $3}"
  exit "$exit_code"
}

# ---- Address and ports ------------------------------------------------------------------------

# find_address: sets ip, the address by which other nodes reach this node. It is the address of the node's name;
# if that is unknown or a loopback address, the address of Slurm's NodeAddr; else the node's first address. A task that is
# alone in its job runs where srun does: the address from which srun has reached slurmd is that of NodeAddr.
find_address() {
  local fields node_info
  ((!alone)) || ip=${SLURM_LAUNCH_NODE_IPADDR-}
  [[ -z $ip ]] || return 0
  read -ra fields < <(getent ahostsv4 "$node" 2>/dev/null)
  ip=${fields[0]-}
  if [[ -z $ip || $ip == 127.* ]]; then
    node_info=$(scontrol show node -o "$node" 2>/dev/null)
    [[ $node_info =~ NodeAddr=([^[:space:]]+) ]] && read -ra fields < <(getent ahostsv4 "${BASH_REMATCH[1]}" 2>/dev/null)
    ip=${fields[0]-}
  fi
  if [[ -z $ip ]]; then
    read -ra fields < <(hostname -I 2>/dev/null)
    ip=${fields[0]:-127.0.0.1}
  fi
}

# read_used_ports: sets used_ports to the TCP ports in use on the node, as /proc has them: hexadecimal, between spaces.
read_used_ports() {
  local file lines all=() LC_ALL=C
  for file in /proc/net/tcp /proc/net/tcp6; do
    [[ -r $file ]] || continue
    mapfile -t -s 1 lines <"$file"
    lines=("${lines[@]#*:*:}") # NUMBER: ADDRESS:PORT …
    all+=("${lines[@]%% *}")
  done
  used_ports=" ${all[*]} "
}

# is_port_used PORT: true if a program on the node uses the port. Without used_ports, a connection to it tells: reading
# /proc/net/tcp takes the kernel longer than all the rest of this script.
is_port_used() {
  local hex
  if [[ -n $used_ports ]]; then
    printf -v hex '%04X' "$1"
    [[ $used_ports == *" $hex "* ]]
  else
    { : <"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null
  fi
}

# pick_ports: sets task_ports. Each task of the job begins its search at another place of the port range, so
# that two tasks on one node do not choose the same port. Ports that the job asks for are compared with all sockets of the node,
# also with those that listen on one address only; http and ssh, which every task has, with those on all addresses.
pick_ports() {
  local i n port used_ports='' span=$((port_high - port_low + 1))
  local next=$(((SLURM_JOB_ID * 7919 + (first_task + index) * ports_per_task) % span)) tried=0 found
  [[ ${port_begins[*]} == '0 0' ]] || read_used_ports
  for i in "${!port_labels[@]}"; do
    found=''
    for ((n = 0; n < port_counts[i]; n++)); do
      if ((port_begins[i])); then
        port=$((port_begins[i] + n))
        if is_port_used "$port"; then
          printf 'sluice: port %s is already in use on %s\n' "$port" "$node" >>"$log"
          finish_task "$exit_port_taken" port_taken
        fi
      else
        while :; do
          port=$((port_low + next))
          ((next = (next + 1) % span, tried += 1))
          is_port_used "$port" || break
          ((tried < span)) || finish_task "$exit_port_taken" port_taken
        done
      fi
      found+=${found:+,}$port
    done
    task_ports[i]=$found
  done
}

# ---- Environment variables --------------------------------------------------------------------

declare -A peer_ip    # address of each task, by ROLE/INDEX
declare -A peer_ports # ports of each task with commas, by ROLE/INDEX/LABEL
declare -A peer_count # number of tasks, by ROLE
environment=()        # lines of sh, read by enter.sh

# read_peers: reads the addresses and ports of all tasks. Fails if the file is not complete.
read_peers() {
  local peer_role peer_index peer_address ports entry rows=0
  while read -r peer_role peer_index _ peer_address ports; do
    peer_ip[$peer_role/$peer_index]=$peer_address
    peer_count[$peer_role]=$((${peer_count[$peer_role]-0} + 1))
    while [[ -n $ports ]]; do
      entry=${ports%%;*} ports=${ports#*;}
      peer_ports[$peer_role/$peer_index/${entry%:*}]=${entry##*:}
    done
    ((rows += 1))
  done <"$attempt_dir/peers.$restart_count"
  ((rows == task_count))
}

# publish_address: does for a task that is alone in its job what the batch script and read_peers do for several.
publish_address() {
  local i prefix names=''
  peer_ip[$role_name/0]=$ip peer_count[$role_name]=1
  for i in "${!task_ports[@]}"; do peer_ports[$role_name/0/${port_labels[i]}]=${task_ports[i]}; done
  for prefix in ${host_names[$role_name]}; do names+=" $prefix-0"; done
  [[ $runtime != pyxis ]] || names+=" $node"
  # Appended, not replaced: a container of Pyxis has mounted this file.
  printf '%s%s\n' "$ip" "$names" >>"$attempt_dir/hosts"
}

# assign NAME VALUE: adds the line NAME='VALUE' for enter.sh.
assign() { environment+=("$1='${2//\'/\'\\\'\'}'"); }

# variable NAME VALUE: sets an environment variable of the task.
variable() { assign "export $1" "$2"; }

# template NAME PART…: sets an environment variable of the task to the expanded parts (see expand).
template() {
  local value
  expand "$role_name/$index" "${@:2}"
  variable "$1" "$value"
}

# family ROLE PREFIX SUFFIX PART…: sets one environment variable for each task i of ROLE, named PREFIX i SUFFIX,
# to the parts expanded for task i (see expand).
family() {
  local i value count=${peer_count[$1]}
  for ((i = 0; i < count; i++)); do
    expand "$1/$i" "${@:4}"
    variable "$2$i$3" "$value"
  done
}

# expand ROLE/INDEX PART…: sets the variable `value` to the expanded parts, joined. A part is one of:
#   =TEXT                            the text
#   host/ROLE/INDEX                  address of a task
#   port/ROLE/INDEX/LABEL            first port of a task with this label
#   hosts/ROLE/LABEL/BEFORE/AFTER    list of all tasks of a role, see expand_hosts
#   slots/ROLE/SLOTS/…               list of the hosts of some roles, see expand_slots
#   index/N                          INDEX of the first argument, plus N
#   own_host                         address of the task ROLE/INDEX
#   own_port/LABEL                   first port of the task ROLE/INDEX with this label
#   own_ports/LABEL                  all ports of the task ROLE/INDEX with this label, with commas
expand() {
  local part own=$1
  value=''
  for part in "${@:2}"; do
    case $part in
      =*) value+=${part#=} ;;
      host/*) value+=${peer_ip[${part#*/}]} ;;
      port/*) value+=${peer_ports[${part#*/}]%%,*} ;;
      hosts/*) expand_hosts "${part#*/}" ;;
      slots/*) expand_slots "${part#*/}" ;;
      index/*) value+=$((${own##*/} + ${part#*/})) ;;
      own_host) value+=${peer_ip[$own]} ;;
      own_port/*) value+=${peer_ports[$own/${part#*/}]%%,*} ;;
      own_ports/*) value+=${peer_ports[$own/${part#*/}]} ;;
    esac
  done
}

# expand_hosts ROLE/LABEL/BEFORE/AFTER: appends to the variable `value` a list with commas of one entry per task of
# ROLE: its address, or address:port (first port with LABEL) if LABEL is not empty. BEFORE and AFTER, such as
# JSON quotes, enclose each entry.
expand_hosts() {
  local i list='' entry rest=$1 list_role label before after
  list_role=${rest%%/*} rest=${rest#*/}
  label=${rest%%/*} rest=${rest#*/}
  before=${rest%%/*} after=${rest#*/}
  for ((i = 0; i < ${peer_count[$list_role]}; i++)); do
    entry=${peer_ip[$list_role/$i]}
    [[ -z $label ]] || entry+=:${peer_ports[$list_role/$i/$label]%%,*}
    list+=${list:+,}$before$entry$after
  done
  value+=$list
}

# expand_slots ROLE/SLOTS/…: appends to the variable `value` a list with commas of one entry address:slots per host of
# the tasks of the roles, in the order of the first task on each host. Each task adds the SLOTS of its role.
expand_slots() {
  local i address list='' rest=$1/ list_role slots addresses=()
  local -A total
  while [[ -n $rest ]]; do
    list_role=${rest%%/*} rest=${rest#*/}
    slots=${rest%%/*} rest=${rest#*/}
    for ((i = 0; i < ${peer_count[$list_role]}; i++)); do
      address=${peer_ip[$list_role/$i]}
      [[ -n ${total[$address]-} ]] || addresses+=("$address")
      total[$address]=$((${total[$address]-0} + slots))
    done
  done
  for address in "${addresses[@]}"; do list+=${list:+,}$address:${total[$address]}; done
  value+=$list
}

# build_environment: sets `environment`, the lines that enter.sh runs. Container runtimes start with an empty
# environment, so the lines also set the variables of Slurm, GPUs and PMI that the task needs. Slurm's variables make
# OpenMPI's mpirun call srun, which is not in the container: tasks get them as SLUICE_SLURM_*, unless the job asks for them
# (slurmVariables) or srun starts its MPI processes. Without a container, the task would inherit them: they are unset.
build_environment() {
  local exported pre_command command post_command framework_server starts_server keep=$((slurm_variables || srun_mpi))
  for exported in USER LOGNAME TZ SLURM_CONF CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK GPU_DEVICE_ORDINAL \
    NVIDIA_VISIBLE_DEVICES; do
    [[ ! -v $exported ]] || variable "$exported" "${!exported}"
  done
  for exported in "${!SLURM_@}" "${!SLURMD_@}"; do
    [[ $exported != SLURM_CONF ]] || continue
    variable "SLUICE_$exported" "${!exported}"
    if ((keep)); then variable "$exported" "${!exported}"; else environment+=("unset $exported"); fi
  done
  for exported in "${!PMI_@}" "${!PMI2_@}" "${!PMIX_@}"; do
    if ((srun_mpi)); then variable "$exported" "${!exported}"; else environment+=("unset $exported"); fi
  done
  role_variables "$role"
  variable SLUICE_ATTEMPT "${attempt_dir##*/}"
  variable SLUICE_RESTART_COUNT "$restart_count"
  role_commands "$role"
  ((starts_server && index == 0)) || framework_server=${framework_server:+wait-$framework_server}
  assign _sluice_server "$framework_server"
  [[ $ssh_mode == off ]] || add_ssh_variables
  assign _sluice_pre "$pre_command"
  assign _sluice_command "$command"
  assign _sluice_post "$post_command"
}

# ---- The task ---------------------------------------------------------------------------------

# wait_for_go: waits until the batch script sends "go" and the file with the addresses of all tasks is complete.
wait_for_go() {
  local part status answer='' deadline
  while :; do
    IFS= read -r -t 2 part
    status=$?
    answer+=$part # a read that timed out may have returned part of the line
    ((stopping)) && finish_task "$exit_stopped" stopped
    ((status > 128)) && continue
    [[ $status == 0 && $answer == go ]] && break
    [[ $status == 0 && $answer == stop ]] && finish_task "$exit_stopped" stopped
    finish_task "$exit_stopped" lost
  done
  deadline=$((SECONDS + 30)) # a network file system may show the file some seconds late
  until read_peers 2>/dev/null; do
    ((stopping)) && finish_task "$exit_stopped" stopped
    if ((SECONDS >= deadline)); then
      printf 'sluice: %s cannot be read on %s\n' "$attempt_dir/peers.$restart_count" "$node" >>"$log"
      finish_task "$exit_start_failed" start_failed
    fi
    sleep 0.5
    peer_count=()
  done
}

# pause: waits 10 ms, or less if the batch script sends a request.
pause() {
  local part='' status=0
  IFS= read -r -t 0.01 part || status=$?
  request+=$part # a read that timed out may have returned part of the line
  if ((status == 0)); then
    [[ $request != stop ]] || stopping=1
    request=''
  elif ((status <= 128)); then # the end of the input
    sleep 0.01
  fi
}

# ---- The container ----------------------------------------------------------------------------

# Slurm sends SIGTERM to every process of a step (proctrack/linuxproc), also to the squashfuse process that
# Apptainer starts for a SIF image: the task loses its file system before it can save. libfuse keeps SIGTERM
# ignored if it is ignored at start, but Apptainer's Go code resets it. So this script mounts the image itself
# and gives Apptainer the directory.

# read_head FILE: sets head to the first bytes of a SIF file, and nul to the character in it that stands for NUL bytes,
# which bash cannot store. The area of the descriptors is almost empty: 12,000 NUL bytes are 12 descriptors or more.
read_head() {
  local pieces IFS='' LC_ALL=C
  mapfile -t -d '' -n 2 pieces <"$1" && [[ ${#pieces[0]} == 31 && ${pieces[1]-} == SIF_MAGIC ]] || return
  mapfile -t -d '' -n 12000 pieces <"$1"
  head="${pieces[*]}"
  for nul in $'\xff' $'\xfe' $'\xfd' $'\xfc' $'\xfb' $'\xfa' $'\xf9' $'\xf8' ''; do [[ $head == *"$nul"* ]] || break; done
  IFS=$nul
  head="${pieces[*]}"
  [[ -n $nul ]]
}

# little_endian START COUNT: sets `value` to the unsigned number at this place of head.
little_endian() {
  local i byte character LC_ALL=C
  value=0
  for ((i = $1 + $2 - 1; i >= $1; i--)); do
    character=${head:i:1} byte=0
    [[ $character == "$nul" ]] || printf -v byte %d "'$character"
    ((value = value * 256 + (byte & 255)))
  done
}

# find_squashfs FILE: sets `offset` to the start of the root file system in a SIF image; fails for other files and
# for encrypted images. A SIF file has a header of 128 bytes and descriptors of 585 bytes.
find_squashfs() {
  local head nul value start count
  read_head "$1" 2>/dev/null || return
  little_endian 96 8
  start=$value
  little_endian 88 8
  for ((count = value; count > 0; count--, start += 585)); do
    little_endian "$start" 5 # a used (1) descriptor of a partition (0x4004)
    ((value == 0x0100004004)) || continue
    little_endian $((start + 201)) 8 # with squashfs (1) as the primary system (2)
    ((value == 0x0000000200000001)) || continue
    little_endian $((start + 17)) 8
    offset=$value
    return
  done
  return 1
}

# find_program NAME…: sets program to the path of the first of these programs that exists.
find_program() {
  local name
  for name; do
    program=$name
    [[ $name != */* ]] || return 0
    ! hash -- "$name" 2>/dev/null || program=${BASH_CMDS[$name]}
    [[ $program != /* ]] || return 0
  done
  return 1
}

has_setuid_starter='' # what needs_user_namespace found

# needs_user_namespace: true if Apptainer is installed with setuid. It then cannot read a FUSE mount of the user,
# unless it uses a user namespace.
needs_user_namespace() {
  local program target starter
  if [[ -z $has_setuid_starter ]]; then
    find_program "$runtime_program"
    if [[ -L $program ]]; then
      target=${program%/*/*}/usr/bin/${program##*/} # as in a package unpacked with its bin beside usr
      if [[ ! -L $target && $target -ef $program ]]; then program=$target; else program=$(readlink -f -- "$program"); fi
    fi
    has_setuid_starter=0
    for starter in "${program%/*/*}"/{libexec,lib,lib64,lib/*-linux-gnu}/{apptainer,singularity}/bin/starter-suid; do
      [[ ! -u $starter ]] || has_setuid_starter=1
    done
  fi
  ((has_setuid_starter))
}

# unmount_stale_images: unmounts images whose squashfuse process was killed, with its job, on this node.
unmount_stale_images() {
  local dir
  for dir in {/tmp,"${TMPDIR:-/tmp}"}/"sluice-image-$UID-"*; do
    [[ ! -e $dir && $dir != *'*' ]] || continue
    { fusermount3 -uz "$dir" || fusermount -uz "$dir"; } 2>/dev/null && rmdir "$dir" 2>/dev/null
  done
}

# mount_image: mounts the role's SIF image on this node, with SIGTERM ignored, and sets image_root to the directory.
# Fails if the image cannot be mounted this way; Apptainer then mounts it.
mount_image() {
  local program offset deadline=$((SECONDS + 20))
  [[ -n $mount_dir ]] && find_program squashfuse_ll squashfuse && find_squashfs "$image_file" || return
  if needs_user_namespace; then
    unshare --user true 2>/dev/null || return
    argv+=(--userns)
  fi
  unmount_stale_images
  set -m # a process group of its own: signals to the task's do not reach it
  (
    trap '' TERM
    exec "$program" -f -o "offset=$offset" "$image_file" "$mount_dir"
  ) </dev/null >/dev/null 2>&1 &
  mount_pid=$!
  set +m
  until compgen -G "$mount_dir/*" >/dev/null; do
    if ! kill -0 "$mount_pid" 2>/dev/null || ((SECONDS >= deadline)); then
      unmount_image
      return 1
    fi
    pause
  done
  image_root=$mount_dir
}

# unmount_image: ends the squashfuse process of mount_image. libfuse unmounts at SIGHUP.
unmount_image() {
  [[ -n $mount_pid ]] || return 0
  kill -HUP "$mount_pid" 2>/dev/null
  wait "$mount_pid" 2>/dev/null
  mount_pid=''
}

# An enroot image is unpacked once per job, node and image, on the node's own disk; the tasks of the job on the node share
# it. Starting the image file would need squashfuse processes, which Slurm's SIGTERM ends before the task can save.
# Each task holds a shared lock while it uses the directory. The last one removes it. What a killed job has left behind
# is not locked: the person's next task on the node removes it.

# remove_root NAME: removes an unpacked image, while the caller holds its lock. Directories in it may be write-protected.
# The lock file is last: without it, another task may unpack the image again under the same name.
remove_root() {
  local root=${ENROOT_DATA_PATH:?}/${1:?}
  [[ ! -d $root ]] || chmod -R u+rwX -- "$root" 2>/dev/null
  rm -rf --one-file-system -- "$root" "$root.ready" "$root.output" "$root".run-*
  rm -f -- "$root.lock"
}

# remove_stale_roots: removes the unpacked images on this node that no task uses. Those of this job are left alone: its
# tasks may be about to use them.
remove_stale_roots() {
  local file lock
  for file in "$ENROOT_DATA_PATH"/*.lock; do
    [[ -e $file && $file != */sluice-"$SLURM_JOB_ID"-"$restart_count"-* ]] || continue
    exec {lock}>>"$file"
    flock --nonblock "$lock" && [[ $file -ef /dev/fd/$lock ]] && remove_root "$(basename -- "$file" .lock)"
    exec {lock}>&-
  done
}

# unpack_image: unpacks the role's image as the container $container. enroot's output goes to the batch log.
unpack_image() {
  local output=$ENROOT_DATA_PATH/$container.output error
  rm -rf --one-file-system -- "${ENROOT_DATA_PATH:?}/$container"
  "$runtime_program" create --name "$container" "$image_file" >"$output" 2>&1 && : >"$ENROOT_DATA_PATH/$container.ready"
  cat "$output" >&2
  [[ ! -e $ENROOT_DATA_PATH/$container.ready ]] || return 0
  ((stopping)) && finish_task "$exit_stopped" stopped
  error=$(LC_ALL=C tr -d '\000-\010\013-\037\177' <"$output" | grep -iE 'error|fatal|fail|cannot|could not|no such|no space' | head -n 1)
  printf 'sluice: the container image %s could not be unpacked on %s: %s\n' "$image_file" "$node" "${error:0:300}" >>"$log"
  finish_task "$exit_image_failed" image_failed "${error:0:300}"
}

# owns_lock: false if another task has removed the lock file since this one has opened it.
owns_lock() { [[ $ENROOT_DATA_PATH/$container.lock -ef /dev/fd/$root_lock ]]; }

is_unpacked() { [[ -e $ENROOT_DATA_PATH/$container.ready ]] && owns_lock; }

# open_root: sets container to the name of the unpacked image, and unpacks it if no other task has done so.
open_root() {
  local name key
  export ENROOT_DATA_PATH=${TMPDIR:-/tmp}/sluice-enroot-$UID
  mkdir -m 700 "$ENROOT_DATA_PATH" 2>/dev/null
  if [[ ! -d $ENROOT_DATA_PATH || -L $ENROOT_DATA_PATH || ! -O $ENROOT_DATA_PATH ]]; then
    printf 'sluice: %s cannot be used on %s\n' "$ENROOT_DATA_PATH" "$node" >>"$log"
    finish_task "$exit_image_failed" image_failed "$ENROOT_DATA_PATH is not a directory of yours on $node"
  fi
  remove_stale_roots
  key=$(cksum <<<"$image_file")
  name=sluice-$SLURM_JOB_ID-$restart_count-${key%% *}
  trap close_root EXIT
  while :; do
    exec {root_lock}>>"$ENROOT_DATA_PATH/$name.lock"
    container=$name
    flock --shared "$root_lock" # waits while another task unpacks the image
    is_unpacked && break
    # Without waiting: a task that has unpacked the image in the meantime keeps its shared lock while it runs.
    if flock --nonblock "$root_lock"; then
      ! owns_lock || is_unpacked || unpack_image
      flock --shared "$root_lock" # not atomic, so the directory may be gone now
      is_unpacked && break
    fi
    ((stopping)) && finish_task "$exit_stopped" stopped
    sleep 0.2
    exec {root_lock}>&-
  done
  export ENROOT_RUNTIME_PATH=$ENROOT_DATA_PATH/$name.run-$role-$index
  mkdir -p "$ENROOT_RUNTIME_PATH"
}

# close_root: removes the unpacked image if no other task uses it.
close_root() {
  [[ -n $container ]] || return 0
  rmdir "${ENROOT_RUNTIME_PATH:-/}" 2>/dev/null
  if flock --nonblock "$root_lock" && owns_lock; then remove_root "$container"; fi
  container=''
}

# ---- Shared memory ------------------------------------------------------------------------------

# Apptainer gives containers the node's /dev/shm and has no option for its size. So it runs in a mount namespace with a
# tmpfs there. Mounting needs a user namespace in which the person is root; the container starts in a second one, in
# which the person has the usual numbers and no privileges.
# unshare and mount may fail, if the node does not allow user namespaces. The file in $4 exists if they have not: then
# the container starts, with file descriptor 9 as its standard error.
# shellcheck disable=SC2016  # the second shell expands the variables
mount_shm='user=$1 group=$2 size=$3 marker=$4
shift 4
mount -t tmpfs -o "size=${size}m,mode=1777,nosuid,nodev" tmpfs /dev/shm &&
  exec unshare --user --map-user="$user" --map-group="$group" -- /bin/sh -c ": >\"\$0\" && exec \"\$@\" 2>&9 9>&-" "$marker" "$@"'

# use_own_shm: changes argv so that the container gets a /dev/shm of its own.
use_own_shm() {
  # setuid programs have no effect in a user namespace
  [[ " ${argv[*]} " == *' --userns '* ]] || ! needs_user_namespace || argv=("${argv[@]:0:3}" --userns "${argv[@]:3}")
  argv=(unshare --user --map-root-user --mount --propagation slave --
    /bin/sh -c "$mount_shm" sh "$UID" "${GROUPS[0]}" "$shm_mib" "$task_dir/own_shm" "${argv[@]}")
}

# exec_container WORD…: replaces this process by a command in the role's container.
exec_container() {
  [[ ${argv[0]-} != unshare ]] || exec "${argv[@]}" "$@" 9>&2 2>/dev/null
  exec "${argv[@]}" "$@"
}

# make_task_dir: makes task_dir, and mount_dir for the image, if it is a file; removes those of tasks that were killed on this node. The name has the node, because nodes
# may share TMPDIR, and the process id of task.sh. TMPDIR may be longer than a unix socket's path allows (107 bytes).
make_task_dir() {
  local dir pid prefix=sluice-task.$UID.$node
  for dir in {/tmp,"${TMPDIR:-/tmp}"}/"$prefix".*.*; do
    pid=${dir##*/"$prefix".} pid=${pid%.*}
    # Another node's name may begin with this one's: only digits are a process id.
    [[ ! -d $dir || $pid == *[!0-9]* ]] || kill -0 "$pid" 2>/dev/null || rm -rf "$dir"
  done
  for dir in /tmp "${TMPDIR:-/tmp}"; do
    task_dir=$dir/$prefix.$$.$RANDOM mount_dir=''
    [[ $runtime != apptainer && $runtime != singularity || ! -f $image_file ]] || mount_dir=$dir/sluice-image-$UID-$$.$RANDOM$RANDOM
    ! mkdir -m 700 -- "$task_dir" ${mount_dir:+"$mount_dir"} 2>/dev/null || return 0
  done
  task_dir=''
  printf 'sluice: no directory can be made in /tmp on %s\n' "$node" >>"$log"
  finish_task "$exit_start_failed" start_failed
}

# mount_hosts: gives the container an /etc/hosts with the names of all tasks and the node's own entries, unless the job
# mounts one. Pyxis has mounted the batch script's file already; without a container there is nothing to mount.
mount_hosts() {
  local i lines node_lines
  [[ $runtime == pyxis || $runtime == none ]] && return
  [[ $ssh_mode == off ]] || mounts+=("$task_dir" "$task_dir" rw)
  for ((i = 1; i < ${#mounts[@]}; i += 3)); do [[ ${mounts[i]} != /etc/hosts ]] || return 0; done
  mapfile lines <"$attempt_dir/hosts"
  mapfile node_lines </etc/hosts
  printf '%s' "${lines[@]}" "${node_lines[@]}" >"$task_dir/hosts"
  mounts+=("$task_dir/hosts" /etc/hosts ro)
}

# container_argv: sets argv, the command that runs enter.sh in the role's container.
container_argv() {
  local i mount mode image_root=$image_file
  case $runtime in
    apptainer | singularity)
      # No --env: Apptainer evaluates such values in a shell. enter.sh sets the variables.
      argv=("$runtime_program" -s exec --cleanenv)
      # PMIx clients read shared files of slurmstepd's PMIx server.
      ((!srun_mpi)) || [[ ! -d ${PMIX_SERVER_TMPDIR-} ]] || argv+=(--bind "${PMIX_SERVER_TMPDIR%/}")
      mount_image
      [[ -z $gpu_option ]] || ((!role_gpus)) || argv+=("$gpu_option")
      ;;
    enroot)
      open_root
      argv=("$runtime_program" start --rw)
      ;;
    pyxis | none) return ;; # pyxis: srun has started this script in the container; none: there is no container
  esac
  for ((i = 0; i < ${#mounts[@]}; i += 3)); do
    mount=${mounts[i]}:${mounts[i + 1]} mode=${mounts[i + 2]}
    case $runtime.$mode in
      enroot.*) argv+=(--mount "$mount:none:x-create=auto,rbind,$mode") ;;
      *.ro) argv+=(--bind "$mount:ro") ;;
      *.rw) argv+=(--bind "$mount") ;;
    esac
  done
  if [[ $runtime == enroot ]]; then
    ((shm_mib)) && argv+=(--mount "tmpfs:/dev/shm:tmpfs:x-create=dir,rw,nosuid,nodev,mode=1777,size=${shm_mib}m")
    argv+=("$container")
  else
    argv+=("$image_root")
  fi
}

# stop_task HAS_SIGTERM: sends SIGTERM to the task, unless it has got it, and starts a timer that sends SIGKILL after the
# grace period. Only the first call after the task's start has an effect.
stop_task() {
  [[ -n $task_pid && -z $kill_timer ]] || return 0
  if ((!$1)); then
    kill -TERM -- "-$task_pid" 2>/dev/null
    [[ $ssh_mode == off ]] || signal_sessions TERM
  fi
  (
    trap '' TERM USR1
    sleep "$grace_s"
    kill -KILL -- "-$task_pid"
  ) >/dev/null 2>&1 &
  kill_timer=$!
  disown "$kill_timer"
}

# on_stop: handles SIGUSR1 of read_requests: the batch script asked to stop the task.
on_stop() {
  interrupted=1
  ((stopping)) && return
  stopping=1
  stop_task 0
}

# on_term: handles SIGTERM of Slurm, which sends it to every process of the step (proctrack/linuxproc) or only to this
# shell (proctrack/cgroup). The process of read_requests tells which: if the signal has not ended it after two seconds, the
# task has not got it either.
on_term() {
  local tries=0 reader_ended=0
  interrupted=1
  ((stopping)) && return
  stopping=1
  while [[ -n $task_pid ]] && ((!reader_ended && tries < 20)); do
    sleep 0.1
    kill -0 "$reader" 2>/dev/null || reader_ended=1
    ((tries += 1))
  done
  stop_task "$reader_ended"
}

# read_requests PID: reads requests of the batch script from standard input; sends SIGUSR1 to PID for "stop". Ends only by
# a signal: on_term needs that.
read_requests() {
  local line
  while IFS= read -r line; do
    [[ $request$line != stop ]] || kill -USR1 "$1"
    request=''
  done
  exec sleep infinity
}

# choose_gpu_devices: sets the variables by which enroot's NVIDIA hook (98-nvidia) decides what it mounts: nothing
# without NVIDIA_VISIBLE_DEVICES, and no CUDA library without NVIDIA_DRIVER_CAPABILITIES. Variables set here take
# precedence over those of the image.
choose_gpu_devices() {
  [[ $runtime == enroot || $runtime == pyxis ]] || return 0
  export NVIDIA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-void}
  [[ $runtime == enroot ]] && ((role_gpus)) || return 0
  grep -qs '^NVIDIA_DRIVER_CAPABILITIES=' "$ENROOT_DATA_PATH/$container/etc/environment" ||
    export NVIDIA_DRIVER_CAPABILITIES=compute,utility
}

# start_task: starts the task in its container; sets task_pid.
start_task() {
  local input text
  if ((has_secrets)); then # bash writes a long here-string to disk
    exec {input}< <(printf '%s\n' "${environment[@]}")
  else
    printf -v text '%s\n' "${environment[@]}"
    exec {input}<<<"$text"
  fi
  set -m # the task gets a process group, so that signals reach all its processes
  exec_container /bin/sh "$attempt_dir/enter.sh" "$work_dir" <&"$input" {input}<&- >>"$log" 2>&1 &
  task_pid=$!
  set +m
  exec {input}<&-
  ((!stopping)) || stop_task 0 # the signal came while the task was started
}

# wait_for_task: waits for the task's end; sets exit_code.
wait_for_task() {
  while
    wait "$task_pid"
    exit_code=$?
    ((interrupted))
  do interrupted=0; done
  kill -KILL -- "-$task_pid" 2>/dev/null # child processes that the task did not end
}

# run_task: runs the task in its container and waits for its end; sets exit_code.
run_task() {
  local argv=() shared_shm_argv
  ((role_gpus)) || export CUDA_VISIBLE_DEVICES=
  [[ $ssh_mode == off ]] || write_ssh_config
  mount_hosts
  container_argv
  shared_shm_argv=("${argv[@]}")
  [[ $runtime != apptainer && $runtime != singularity ]] || ((!shm_mib)) || use_own_shm
  choose_gpu_devices
  build_environment
  [[ $ssh_mode == off ]] || accept_sessions
  ((stopping)) && finish_task "$exit_stopped" stopped
  set -m # a process group, which the signals of stop_task do not reach
  read_requests "$$" <&0 >/dev/null 2>&1 &
  reader=$! # before the task: on_term needs it
  disown "$reader"
  set +m
  start_task
  set_now
  state=running started=$now
  write_state
  wait_for_task
  if [[ ${argv[0]-} == unshare && ! -e $task_dir/own_shm ]] && ((!stopping)); then # the container has not started
    printf 'sluice: shmMB has no effect on %s, because it does not allow user namespaces: /dev/shm is the one of the node\n' "$node" >>"$log"
    argv=("${shared_shm_argv[@]}")
    [[ $ssh_mode == off ]] || accept_sessions
    start_task
    wait_for_task
  fi
}

# hold_for_debugging: waits, so that a failed task of a job with isDebug keeps its node for inspection. Returns when
# the job is stopped or Sluice creates the file "release" in the attempt's directory.
hold_for_debugging() {
  state=debug task_pid='' # the task's process group has ended: on_term must not signal its number
  write_state
  until ((stopping)) || [[ -e $attempt_dir/release ]]; do sleep 2; done
}

main() {
  [[ -z $session_data ]] || run_session
  trap on_term TERM
  trap on_stop USR1
  log_offset=0
  [[ ! -s $log ]] || log_offset=$(stat -c %s -- "$log")
  find_address
  pick_ports
  make_task_dir
  [[ $ssh_mode == off ]] || start_sshd
  write_state
  format_ports
  printf 'ready %s %s %s %s %s %s\n' "$role" "$index" "${SLURM_STEP_ID-}" "$node" "$ip" "$all_ports"
  if ((alone)); then publish_address; else wait_for_go; fi
  run_task
  if ((stopping)); then
    ((exit_code)) && finish_task "$exit_code" stopped
  elif ((exit_code && is_debug)); then
    hold_for_debugging
  fi
  finish_task "$exit_code" ''
}

main
