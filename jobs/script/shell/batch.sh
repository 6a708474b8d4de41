# ---- How the job runs -----------------------------------------------------------------------
# This script starts one step per role, or one for all roles of an MPI program; srun runs task.sh once per
# task. Every task reports "ready" with its address and ports. When all tasks have reported, this script writes
# the addresses and ports to the file peers.RESTART_COUNT and sends "go" to the tasks; a task that is alone in its
# job starts at once. Tasks write their reports to their standard output, and srun forwards it to this script, so nothing
# polls a shared file system. The first completion rule that holds decides the outcome of the job (completed, failed or
# stopped) and the exit code of this script.
# For a small job, starting processes is most of what this script costs: it starts none where bash can do the work.

set -u
umask 077
restart_count=${SLURM_RESTART_COUNT:-0} # how often Slurm has requeued the job; it runs in the same directory again
task_count=0
ready_tasks=0 ended_tasks=0 live_steps=0 started=0 stopping=0 stop_requested=0
limit_announced=0 limit_check_at=0 limit_end='' time_limit_near=0 signalled_by_slurm=0
scratch='' partial_line='' outcome='' job_exit=0 deciding_role='' deciding_index=''
declare -A address ports host task_ended made_dirs
declare -a failed succeeded ended_in_role go_pipe step_of # by role
declare -a step_live step_out_of_memory                    # by step

log_message() { printf '%(%F %T)T  %s\n' -1 "$*"; }

# set_now: sets now to the time in seconds since the epoch; bash has fractions since 5.0.
set_now() {
  now=${EPOCHREALTIME-}
  [[ -n $now ]] || printf -v now '%(%s)T' -1
}

# open_pipe: sets pipe to the descriptor of a new pipe, open for reading and writing. A here-string is a pipe since bash 5.1,
# and a file before.
open_pipe() {
  local end
  exec {end}<<<''
  [[ -p /dev/fd/$end ]] || exec {end}< <(:)
  exec {pipe}<>"/dev/fd/$end" {end}<&-
  ! read -t 0 -u "$pipe" || read -r -u "$pipe"
}

# write_atomically FILE: replaces the file by standard input; readers see the old file or the new one.
write_atomically() { cat >"$1.new" && mv -f "$1.new" "$1"; }

# write_task_state ROLE INDEX KEY=VALUE…: adds to the state file of a task whose task.sh does not run. See write_state in task.sh.
write_task_state() {
  local text rest
  printf -v text 'role=%s\nindex=%s\nrestart_count=%s\nhost=%s\nip=%s\n' \
    "${role_names[$1]}" "$2" "$restart_count" "${host[$1.$2]-}" "${address[$1.$2]-}"
  printf -v rest '%s\n' "${@:3}"
  printf 'begin\n%s%send\n' "$text" "$rest" >>"tasks/${role_names[$1]}-$2.state"
}

# decide OUTCOME RULE ROLE INDEX EXIT_CODE REASON [ERROR]: sets the outcome of the job and writes the file "result".
# Only the first call has an effect. ERROR is the message of the program that failed.
decide() {
  [[ -z $outcome ]] || return 0
  outcome=$1 job_exit=$5
  local rule=$2 role=''
  ((time_limit_near)) && [[ $1 == failed ]] && rule=time_limit
  [[ -n $3 ]] && role=${role_names[$3]}
  set_now
  printf 'begin\noutcome=%s\nrule=%s\nrole=%s\nindex=%s\nexit_code=%s\nreason=%s\nimage=%s\nerror=%s\nrestart_count=%s\nended=%s\nend\n' \
    "$outcome" "$rule" "$role" "$4" "$5" "$6" "${3:+${image_names[$3]}}" "${7-}" "$restart_count" "$now" >result
  log_message "$outcome: $rule ${role:+$role-$4 }exit code $5 ${6:+($6)}"
  deciding_role=$3 deciding_index=$4
}

# check_stop: decides the outcome if the job is to stop. Fails if the outcome is decided.
check_stop() {
  ((!stopping)) || decide stopped stop '' '' "$exit_stopped" stopped
  [[ -z $outcome ]]
}

prepare() {
  cd "$attempt_dir" || exit "$exit_start_failed"
  make_directories
  begin_hosts
  open_pipe
  events=$pipe
  trap on_exit EXIT
  trap 'stopping=1' TERM                  # from Slurm: cancelled, preempted, requeued, time limit
  trap 'stopping=1 stop_requested=1' USR2 # a requested stop: scancel --batch --signal=USR2
  trap 'limit_announced=1 limit_check_at=0' USR1 # from Slurm (sbatch --signal), before the time limit
  local name r s
  # Each srun gets all its options as arguments; the variables that sbatch sets would add further options.
  for name in "${!SLURM_@}"; do
    case $name in
      SLURM_GPU* | SLURM_TRES* | SLURM_MEM_PER* | SLURM_CPUS_PER_TASK* | SLURM_NTASKS* | SLURM_NPROCS* | \
        SLURM_EXPORT_ENV | SLURM_GET_USER_ENV | SLURM_DISTRIBUTION) unset "$name" ;;
    esac
  done
  for r in "${!role_names[@]}"; do
    failed[r]=0 succeeded[r]=0 ended_in_role[r]=0
    ((task_count += role_tasks[r]))
  done
  for s in "${!step_roles[@]}"; do
    step_live[s]=0
    for r in ${step_roles[s]//,/ }; do step_of[r]=$s; done
  done
}

# make_directories: makes the directories of the attempt and those in created_dirs that do not exist, with one program, and
# removes what the run before a requeue has left. check_directories reports those that could not be made.
make_directories() {
  local dir missing=() stale=()
  for dir in logs tasks work "${created_dirs[@]}"; do
    [[ ! -d $dir ]] || continue
    missing+=("$dir") made_dirs[$dir]=1
  done
  ((${#missing[@]} == 0)) || mkdir -p -- "${missing[@]}" 2>/dev/null
  for dir in tasks/*.state peers.* result release pulling; do [[ ! -e $dir ]] || stale+=("$dir"); done
  ((${#stale[@]} == 0)) || rm -f -- "${stale[@]}"
}

# make_scratch: makes scratch, a private directory on this node, for work before the tasks start.
make_scratch() {
  [[ -n $scratch ]] || scratch=$(mktemp -d "${TMPDIR:-/tmp}/sluice.XXXXXXXX") || exit "$exit_start_failed"
}

# remove_secrets: removes the keys of this run and the values of secrets. After SIGTERM from Slurm the job may be requeued and
# run again in this directory: secrets.sh stays then, and Sluice removes it when the job has ended.
remove_secrets() {
  local names=()
  [[ ! -e ssh ]] || names=(ssh)
  ((stopping && !stop_requested)) || [[ ! -e secrets.sh ]] || names+=(secrets.sh)
  ((${#names[@]} == 0)) || rm -rf "${names[@]}"
}

# shellcheck disable=SC2329  # the trap for EXIT calls it
on_exit() {
  remove_secrets
  [[ -z $scratch ]] || rm -rf "$scratch" pulling
}

# wait_for_secrets: waits for secrets.sh. If the script has removed it and Slurm has requeued the job nevertheless (RequeueExit,
# scontrol requeue), Sluice writes it again when it sees that the job waits.
wait_for_secrets() {
  local deadline=$((SECONDS + 300))
  ((has_secrets)) || return 0
  until [[ -e secrets.sh ]]; do
    check_stop || return 0
    if ((SECONDS >= deadline)); then
      fail_start "$exit_start_failed" start_failed "the values of the job's secrets are not in $attempt_dir"
      return
    fi
    sleep 2 &
    wait "$!"
  done
}

# fail_start EXIT_CODE REASON MESSAGE [ROLE [ERROR]]: fails the job before its tasks start. Writes the message to the
# logs of all tasks, or of the tasks of ROLE.
fail_start() {
  local r i
  for r in "${!role_names[@]}"; do
    [[ -z ${4-} || $r == "$4" ]] || continue
    for ((i = 0; i < role_tasks[r]; i++)); do
      printf 'sluice: %s\n' "$3" >>"logs/${role_names[r]}-$i.log"
      set_now
      write_task_state "$r" "$i" state=ended "exit_code=$1" "reason=$2" "ended=$now"
    done
  done
  decide failed start "${4-}" "${4:+0}" "$1" "$2" "${5-}"
}

# check_directories: fails the job if a directory in created_dirs cannot be made, or one in required_dirs does not exist.
check_directories() {
  local dir
  for dir in "${created_dirs[@]}"; do
    [[ -d $dir ]] || mkdir -p -- "$dir" || fail_start "$exit_mount_missing" mount_missing "cannot make the directory $dir"
  done
  for dir in "${required_dirs[@]}"; do
    [[ -e $dir ]] || fail_start "$exit_mount_missing" mount_missing "there is no $dir on the cluster"
  done
}

# correct_code_links: makes the symbolic links in code.new, which becomes "code", lead to where they lead in the source:
# a relative link out of the source becomes absolute. An absolute link to a file of the source leads to its copy.
correct_code_links() {
  local source link target path top
  source=$(realpath -- "$code_source")
  find code.new -type l \( -lname '/*' -o -lname '*..*' \) -print0 | while IFS= read -r -d '' link; do
    link=${link#code.new/}
    target=$(readlink -- "$source/$link")
    if [[ $target == /* ]]; then
      path=$(realpath -ms -- "$target")
      for top in "$source" "${code_source%/}"; do
        [[ $path/ != "$top"/* ]] || path=$attempt_dir/code${path#"$top"}
      done
    else
      path=$(realpath -ms -- "$source/$(dirname -- "$link")/$target")
      [[ $path/ != "$source"/* ]] || continue
    fi
    ln -sfn -- "$path" "code.new/$link"
  done
}

# copy_code_files: copies code_source to the directory "code". Exit code 2: it is too large. Its size in bytes is
# in the file code_bytes.
copy_code_files() {
  local size
  size=$(du -sb -- "$code_source/.") || return 1 # fails if a directory cannot be read
  size=${size%%[[:space:]]*}
  printf '%s' "$size" >"$scratch/code_bytes"
  ((size <= code_limit_mib * 1048576)) || return 2
  rm -rf code.new
  cp -R --preserve=mode,timestamps,links -- "$code_source/." code.new || return 1
  chmod -R u+rwX code.new # the owner must be able to delete the copy
  correct_code_links
  mv code.new code
}

# copy_code: copies code_source, so that tasks never write to it. A requeued job keeps the copy that it has.
copy_code() {
  [[ -n $code_source && ! -e code ]] || return 0
  local child status detail
  make_scratch
  # Run in the background, because bash runs traps only after a foreground command has ended.
  copy_code_files 2>"$scratch/code_errors" &
  child=$!
  while ((!stopping)) && kill -0 "$child" 2>/dev/null; do wait "$child"; done
  if ((stopping)); then
    kill "$child" 2>/dev/null
    return
  fi
  wait "$child"
  status=$?
  if ((status == 2)); then
    detail=$((($(<"$scratch/code_bytes") + 1048575) / 1048576))
    fail_start "$exit_code_too_large" code_too_large \
      "the code directory $code_source has $detail MB; at most $code_limit_mib MB are copied for a job" '' "$detail"
  elif ((status)); then
    detail=$(tail -n 1 "$scratch/code_errors" | cut -c -300)
    detail=${detail//"/./"//} # from "$code_source/."
    fail_start "$exit_code_failed" code_failed "the code directory $code_source could not be copied: $detail" '' "$detail"
  fi
}

# ---- The head of the batch log ----------------------------------------------------------------

# is_public DIRECTORY: true if every user of the cluster may list the directory.
is_public() {
  local dir=$1
  [[ $(stat -Lc %A -- "$dir" 2>/dev/null) == ???????r?[xt] ]] || return
  while dir=${dir%/*} && [[ -n $dir ]]; do
    [[ $(stat -Lc %A -- "$dir" 2>/dev/null) == *[xt] ]] || return
  done
}

# log_directory NAME DIRECTORY: prints the directory, how many entries it has and the names of the first ones. More
# people may read this log than a person's own directories: names are printed only of files that they may read, too.
log_directory() {
  local entries=() name count
  printf '  %s=%s\n' "$1" "$2"
  [[ -d $2 ]] || return 0
  # A directory that this script has made is empty.
  [[ -n ${made_dirs[$2]-} ]] || mapfile -t entries < <(timeout 5 ls -AU -- "$2" 2>/dev/null | head -n 1000 | sort)
  count=${#entries[@]}
  ((count < 1000)) || count='1000 or more'
  printf '    entries: %s\n' "$count"
  [[ $2 == "${attempt_dir%/*}"/* ]] || is_public "$2" || return 0
  for name in "${entries[@]:0:10}"; do printf '    %s\n' "${name//[[:cntrl:]]/?}"; done
  ((${#entries[@]} <= 10)) || printf '    …\n'
}

# log_commands: prints the commands of each role, as they run. Values of secrets are variables and no part of them.
# Settings that this script has, too, have the same values in roles.sh.
log_commands() {
  local r line text='' LC_ALL=C pre_command command post_command
  # shellcheck source=/dev/null
  . "$attempt_dir/roles.sh" || return
  for r in "${!role_names[@]}"; do
    ((${#text} < 20000)) || break
    role_commands "$r"
    text+="  command of role ${role_names[r]}, tasks: ${role_tasks[r]}"$'\n'
    while IFS= read -r line && ((${#text} < 20000)); do
      [[ -z $line ]] || text+="    $line"$'\n'
    done <<<"$pre_command"$'\n'"$command"$'\n'"$post_command"
  done
  printf '%s' "${text:0:20000}"
}

# log_job: prints what the job runs, and on which directories.
log_job() {
  local i
  log_message "attempt ${attempt_dir##*/}, Slurm job $SLURM_JOB_ID on ${SLURM_JOB_NODELIST-}"
  for ((i = 0; i < ${#log_dirs[@]}; i += 2)); do log_directory "${log_dirs[i]}" "${log_dirs[i + 1]}"; done
  log_commands
}

# image_registry SOURCE: sets `registry` to the registry of an image: docker.io if the image's name contains none.
image_registry() {
  local name=${1#*://}
  registry=''
  [[ $name != *[/#]* ]] || registry=${name%%[/#]*}
  [[ $registry == *[.:]* || $registry == localhost ]] || registry=docker.io
  is_docker_hub "$registry" && registry=docker.io
}

is_docker_hub() { [[ -z $1 || $1 =~ ^(docker\.io|index\.docker\.io|registry-1\.docker\.io|hub\.docker\.com)$ ]]; }

# read_auth_file REGISTRY: sets user and password to the login in authFile. The file has OpenPAI's format: registry,
# user name and password, one per line. A login for another registry is not used: that registry would learn the password.
read_auth_file() {
  local login_registry='' login_user='' login_password=''
  # The last line may have no line break; read fails then.
  { read -r login_registry && read -r login_user && read -r login_password; } <"$auth_file"
  if [[ -z $login_password ]]; then
    printf 'the file %s must contain registry, user name and password, one per line\n' "$auth_file"
    return 1
  fi
  login_registry=${login_registry#*://} login_registry=${login_registry%%/*}
  is_docker_hub "$login_registry" && login_registry=docker.io
  if [[ $login_registry == "$1" ]]; then
    user=$login_user password=$login_password
  else
    printf 'the login in %s is for %s and not used for %s\n' "$auth_file" "$login_registry" "$1"
  fi
}

# load_image_login SOURCE: makes the user name and password for fetching an image known to the container runtime. They
# come from the file that authFile in the job file names, or from secrets.sh, which takes precedence.
load_image_login() {
  local user='' password='' registry i image_logins=()
  image_registry "$1"
  [[ -z $auth_file ]] || read_auth_file "$registry" || return
  if ((has_image_logins)); then
    # shellcheck source=/dev/null
    . "$attempt_dir/secrets.sh" || return
    for ((i = 0; i < ${#image_logins[@]}; i += 3)); do
      [[ ${image_logins[i]} != "$1" ]] || user=${image_logins[i + 1]} password=${image_logins[i + 2]}
    done
  fi
  [[ -n $user$password ]] || return 0
  if [[ ${fetch_command[1]} == import ]]; then
    write_enroot_login
    return
  fi
  export APPTAINER_DOCKER_USERNAME=$user APPTAINER_DOCKER_PASSWORD=$password
  export SINGULARITY_DOCKER_USERNAME=$user SINGULARITY_DOCKER_PASSWORD=$password
}

# write_enroot_login: writes the login to a credentials file for enroot, in netrc format, in a private directory.
# enroot (4.1) looks for the registry's name there, and curl for the name of the server that grants tokens, which is
# known only to the registry: the entry "default". enroot evaluates a password that begins with $ in a shell.
write_enroot_login() {
  local machine=$registry
  if [[ $user$password == *[[:space:]]* || $user == \"* || $password == [\$\"]* ]]; then
    printf 'enroot cannot use the login for %s: it must not contain spaces, and the password must not begin with $ or "\n' "$registry"
    return 1
  fi
  if [[ $registry == docker.io ]]; then # enroot finds no user name for Docker Hub in the file
    machine=registry-1.docker.io image_source=docker://$user@${image_source#docker://}
  fi
  export ENROOT_CONFIG_PATH=$scratch/enroot
  mkdir -p "$ENROOT_CONFIG_PATH"
  {
    printf 'machine %s login %s password %s\n' "${machine%:*}" "$user" "$password"
    [[ $machine != *:* ]] || printf 'machine %s login %s password %s\n' "$machine" "$user" "$password"
    printf 'default login %s password %s\n' "$user" "$password"
  } >"$ENROOT_CONFIG_PATH/.credentials"
}

# fetch_image SOURCE FILE: fetches an image while it holds a lock, because another job may fetch the same file.
fetch_image() {
  mkdir -p "${2%/*}"
  (
    image_source=$1 code=0
    load_image_login "$1" || exit
    flock 9
    [[ ! -e $2 ]] || exit 0
    rm -f "$2.$SLURM_JOB_ID" # from before a requeue
    "${fetch_command[@]}" "$2.$SLURM_JOB_ID" "$image_source" && mv "$2.$SLURM_JOB_ID" "$2" || code=$?
    rm -rf "$2.$SLURM_JOB_ID" "$scratch/enroot"
    exit "$code"
  ) 9>"$2.lock"
}

# report_pull ROLE FILE: writes the progress of fetching an image to the file "pulling". It counts the bytes of FILE and
# of the layers in the caches of Apptainer, Singularity and enroot that are newer than the start.
report_pull() {
  local bytes
  bytes=$(find "$2.$SLURM_JOB_ID" \
    "${APPTAINER_CACHEDIR:-$HOME/.apptainer}/cache/blob" "${SINGULARITY_CACHEDIR:-$HOME/.singularity}/cache/blob" \
    "${ENROOT_CACHE_PATH:-${XDG_CACHE_HOME:-$HOME/.cache}/enroot}" \
    -type f -newer "$scratch/fetch_start" -printf '%s\n' 2>/dev/null | awk '{ sum += $1 } END { printf "%.0f", sum }')
  printf 'role=%s\nimage=%s\nbytes=%s\n' "${role_names[$1]}" "${image_names[$1]}" "$bytes" | write_atomically pulling
}

# find_error FILE SOURCE: prints the line of a container runtime's output that names the error, at most 300 characters,
# without control characters and without the messages of the callers that Apptainer writes before the image's name.
find_error() {
  local line
  line=$(sed -e 's/\x1b\[[0-9;]*m//g' "$1" | tr '\r' '\n' | LC_ALL=C tr -d '\000-\010\013-\037\177' |
    grep -iE '^\[?(FATAL|ERROR|curl:)' | tail -n 1)
  [[ -n $line ]] || line=$(LC_ALL=C tr -d '\000-\010\013-\037\177' <"$1" | grep '[^[:space:]]' | tail -n 1)
  [[ $line =~ ^\[?(FATAL|ERROR)(:|\])[[:space:]]*(.*) ]] && line=${BASH_REMATCH[3]}
  line=${line##*"$2: "}
  printf '%s' "${line:0:300}"
}

# check_images: fetches missing images that have a source in a registry; fails the job if an image is missing then.
check_images() {
  local r
  for r in "${!role_names[@]}"; do
    check_stop || return
    [[ -n ${image_files[r]} && ! -e ${image_files[r]} ]] || continue
    if [[ -n ${image_sources[r]} ]]; then
      pull_image "$r"
    else
      fail_start "$exit_image_missing" image_missing "there is no container image ${image_files[r]}" "$r"
    fi
  done
}

# Answers of registries and of their clients to a request that fails every time.
registry_refusal='(manifest|name) unknown|404 not found|(manifest|repository|image).* not found|denied|unauthorized|forbidden|invalid reference'

# end_group ID: ends the processes of a process group: SIGTERM, and SIGKILL after five seconds.
end_group() {
  local tries
  kill -TERM -- "-$1" 2>/dev/null
  for ((tries = 0; tries < 50; tries++)); do
    kill -0 -- "-$1" 2>/dev/null || return 0
    sleep 0.1
  done
  kill -KILL -- "-$1" 2>/dev/null
}

# pull_image ROLE: fetches the role's image from its registry and reports the progress; fails the job if that fails.
pull_image() {
  local i fetch error source=${image_sources[$1]} file=${image_files[$1]}
  for ((i = 0; i < role_tasks[$1]; i++)); do write_task_state "$1" "$i" state=pulling "image=${image_names[$1]}"; done
  log_message "fetching $source"
  make_scratch
  : >"$scratch/fetch_start"
  # Run in the background, because bash runs traps only after a foreground command has ended.
  set -m # a process group, so that a stop reaches all its processes
  { fetch_image "$source" "$file" 2>&1 | tee "$scratch/fetch.log"; } &
  fetch=$!
  set +m
  while ((!stopping)) && kill -0 "$fetch" 2>/dev/null; do
    report_pull "$1" "$file"
    sleep 2 >/dev/null 2>&1 &
    wait -n # for the end of one of the two, or a signal
  done
  rm -f pulling
  if ((stopping)); then
    end_group "$fetch" # else it may write the file again
    rm -f "$file.$SLURM_JOB_ID"
    return
  fi
  [[ ! -e $file ]] || return 0
  error=$(find_error "$scratch/fetch.log" "$source")
  if grep -qiE "$registry_refusal" <<<"${error/permission denied/}"; then
    fail_start "$exit_image_missing" image_missing "the registry has no container image $source for you: $error" "$1" "$error"
  else
    fail_start "$exit_image_failed" image_failed "the container image $source could not be fetched: $error" "$1" "$error"
  fi
}

# If slurmctld hangs, it may create a step although its reply to srun is lost. srun (22.05) repeats the
# request after a minute. The answer is then "nodes are busy", because of the unused step, which scancel does
# not remove, and srun repeats the request until the time limit. No task has run, so this script kills srun
# and starts it again. srun prints these messages when it is in that state:
no_reply='step creation (temporarily|still) disabled, retrying \((Socket timed out|Zero Bytes|Requested nodes are busy)'

lost_reply='Unable to create step for job [0-9]+: (Socket timed out|Zero Bytes)'
unreachable='Unable to (confirm allocation|create step) for job [0-9]+: Unable to contact slurm controller|'
unreachable+='Unable to confirm allocation for job [0-9]+: (Socket timed out|Zero Bytes)'
out_of_memory='exceeded .*memory limit|oom[-_ ]?kill|out[-_ ]of[-_ ]memory' # in lower case

# run_srun: runs srun with the words in arguments and sets code. Copies srun's messages to the batch log; kills srun if it waits
# for a step because of a lost reply. Sets got_no_reply if so, messages, and out_of_memory_seen.
run_srun() {
  local srun input line status read_timeout=()
  messages='' got_no_reply=0
  open_pipe
  exec {input}<"/dev/fd/$pipe"
  srun "${arguments[@]}" </dev/null 1>&"$events" 2>&"$pipe" &
  srun=$!
  exec {pipe}>&- # srun's end closes the pipe
  while :; do
    line='' status=0
    IFS= read -r "${read_timeout[@]}" -u "$input" line || status=$?
    if [[ -n $line ]]; then
      messages+=$line$'\n'
      printf '%s\n' "$line" >&2
      [[ ! ${line,,} =~ $out_of_memory ]] || out_of_memory_seen=1
    fi
    if ((status > 128 && ${#read_timeout[@]})); then # srun has not printed "Step created" within 5 s after such a message
      got_no_reply=1
      kill "$srun"
    elif ((status && status <= 128)); then
      break
    fi
    read_timeout=()
    [[ ! $line =~ $no_reply ]] || read_timeout=(-t 5)
  done
  exec {input}<&-
  while
    interrupted=0 code=0
    wait "$srun" || code=$?
    ((interrupted))
  do :; done
}

# reply_was_lost: true if srun got no step, but Slurm may have created one.
reply_was_lost() { ((got_no_reply)) || [[ $messages =~ $lost_reply ]]; }

# controller_was_unreachable: true if srun created no step because slurmctld did not reply (22.05).
controller_was_unreachable() { [[ $messages =~ $unreachable ]]; }

# has_own_allocation STEP: true if no other step shares an allocation with the step.
has_own_allocation() {
  local r own
  for r in "${!role_groups[@]}"; do
    ((step_of[r] == $1)) && continue
    for own in ${step_roles[$1]//,/ }; do [[ ${role_groups[r]} != "${role_groups[own]}" ]] || return 1; done
  done
}

# join_names STEP: sets step_name to the names of the step's roles, joined with +.
join_names() {
  local r
  step_name=''
  for r in ${step_roles[$1]//,/ }; do step_name+=${step_name:++}${role_names[r]}; done
}

# srun_arguments STEP: sets arguments, those of srun, from options and the array more_options. Each component of a het
# job gets all options and the program.
srun_arguments() {
  local word program
  program=(/bin/bash "$attempt_dir/task.sh" "$attempt_dir" "${step_roles[$1]}" "$restart_count")
  arguments=()
  for word in "${options[@]}" :; do
    [[ $word != : ]] || arguments+=("${more_options[@]}" "${program[@]}")
    arguments+=("$word")
  done
  unset 'arguments[-1]'
}

# start_step STEP: runs srun for the step's tasks, in a process of its own. If slurmctld does not reply, repeats this for up to
# ten minutes. Slurm sends a signal to all processes of the job (proctrack/linuxproc) or only to the batch script
# (proctrack/cgroup, scancel --batch): if this process gets SIGTERM, the tasks get it, too.
start_step() {
  trap 'interrupted=1; printf "signalled\n" >&"$events"' TERM
  trap 'interrupted=1' USR1 USR2
  local options arguments more_options step_name code messages got_no_reply interrupted out_of_memory_seen=0
  local reason=none lost=0 deadline=$((SECONDS + 600))
  join_names "$1"
  more_options=(--export=ALL --kill-on-bad-exit=0 --wait=0 --job-name="$step_name")
  step_options "$1"
  while :; do
    srun_arguments "$1"
    run_srun
    ((code && SECONDS < deadline)) && [[ ! -e result ]] || break # result: the outcome is decided
    if reply_was_lost; then
      if has_own_allocation "$1"; then
        # The unused step holds the CPUs and memory: the new step shares them. --mem=0 requests all memory of
        # the job.
        options=("${options[@]/#--mem*/--mem=0}") more_options+=(--overlap)
      elif ((lost++)); then
        code=$exit_launch_failed reason=launch_failed # a step with --overlap would use another step's resources
        break
      fi
    elif ! controller_was_unreachable; then
      break
    fi
    log_message "Slurm's controller does not reply: starting role $step_name again in 3 s"
    sleep 3
  done
  printf 'step %s %s %s %s\n' "$1" "$code" "$reason" "$out_of_memory_seen" >&"$events"
}

# use_pyxis_shm ROLE MIB: gives the containers of the role a /dev/shm of this size. Pyxis (0.24) only binds directories, but
# it passes ENROOT_CONFIG_PATH to enroot, and enroot mounts what the files in mounts.d there say. The person's own
# configuration of enroot stays in effect.
# shellcheck disable=SC2329  # step_options calls it
use_pyxis_shm() {
  local own=${ENROOT_CONFIG_PATH:-${XDG_CONFIG_HOME:-$HOME/.config}/enroot} dir=$attempt_dir/enroot/$1 entry
  rm -rf "$dir"
  mkdir -p "$dir/mounts.d"
  for entry in "$own"/* "$own/.credentials" "$own"/mounts.d/*; do
    [[ ! -e $entry || $entry == "$own/mounts.d" ]] || ln -s "$entry" "$dir/${entry#"$own/"}"
  done
  printf 'tmpfs /dev/shm tmpfs x-create=dir,rw,nosuid,nodev,mode=1777,size=%sm\n' "$2" >"$dir/mounts.d/90-sluice-shm.fstab"
  export ENROOT_CONFIG_PATH=$dir
}

start_steps() {
  local r s pipe
  for r in "${!role_names[@]}"; do # srun reads the pipe of the first role of each component
    open_pipe
    go_pipe[r]=$pipe
  done
  for s in "${!step_roles[@]}"; do
    start_step "$s" &
    step_live[s]=1 step_out_of_memory[s]=0
    ((live_steps += 1))
  done
}

# end_steps: asks task.sh of every running task to send SIGTERM to its program, and SIGKILL after the grace period. The
# request goes through srun's standard input, because a signal that Slurm sends would reach either every process of
# the step (proctrack/linuxproc) or only task.sh (proctrack/cgroup).
end_steps() {
  local r
  for r in "${!role_names[@]}"; do
    # The tasks of a component read the pipe of its first role.
    ((step_live[step_of[r]])) && printf 'stop\n' >&"${go_pipe[r]}"
  done
}

# begin_hosts: begins the file "hosts", to which on_ready adds the tasks. Pyxis mounts it as /etc/hosts when srun starts a
# container; other runtimes start containers later, and task.sh adds the node's own /etc/hosts.
begin_hosts() {
  : >hosts
  [[ $runtime == pyxis ]] || return 0
  printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' >hosts
  grep -vE '^[[:space:]]*(127\.|::1[[:space:]]|#|$)' /etc/hosts >>hosts
}

# print_hosts: prints lines of /etc/hosts: the names of all tasks, and for Pyxis of their nodes.
print_hosts() {
  local r i name names
  for r in "${!role_names[@]}"; do
    for ((i = 0; i < role_tasks[r]; i++)); do
      names=''
      for name in ${role_hosts[r]}; do names+=" $name-$i"; done
      [[ $runtime != pyxis ]] || names+=" ${host[$r.$i]}"
      printf '%s%s\n' "${address[$r.$i]}" "$names"
    done
  done
}

# make_ssh_keys: makes the keys by which the tasks reach each other, for this run of the job only. The directory can be
# read by the owner only.
make_ssh_keys() {
  [[ $ssh_mode != off ]] || return 0
  rm -rf ssh && mkdir ssh && ssh-keygen -q -t ed25519 -N '' -C sluice -f ssh/host_key &&
    ssh-keygen -q -t ed25519 -N '' -C sluice -f ssh/user_key && printf 'sluice-task %s\n' "$(<ssh/host_key.pub)" >ssh/known_hosts && return
  rm -rf ssh
  [[ $ssh_mode == optional ]] ||
    fail_start "$exit_ssh_failed" ssh_failed "jobssh: ssh-keygen could not make the job's keys on ${SLURMD_NODENAME:-the first node}"
}

# print_peers: prints one line per task: role, index, host, address, ports.
print_peers() {
  local r i
  for r in "${!role_names[@]}"; do
    for ((i = 0; i < role_tasks[r]; i++)); do
      printf '%s %s %s %s %s\n' "${role_names[r]}" "$i" "${host[$r.$i]}" "${address[$r.$i]}" "${ports[$r.$i]}"
    done
  done
}

# on_ready ROLE INDEX STEP HOST ADDRESS PORTS: handles the report of a task that waits for "go".
on_ready() {
  host[$1.$2]=$4 address[$1.$2]=$5 ports[$1.$2]=$6
  ((ready_tasks += 1))
  ((ready_tasks == task_count)) || return 0
  if ((task_count > 1)) || [[ $ssh_mode != off ]]; then
    publish_addresses || return
  fi
  started=1
  log_message "all $task_count tasks are ready and start"
}

# publish_addresses: writes the addresses of all tasks to the files "hosts" and peers.RESTART_COUNT and sends "go". A task that
# is alone in its job does not wait for it.
publish_addresses() {
  local r
  # Appended, not replaced: a container of Pyxis has mounted this file.
  print_hosts >>hosts
  if ! print_peers | write_atomically "peers.$restart_count"; then
    fail_start "$exit_start_failed" start_failed "the addresses of the tasks could not be written to $attempt_dir"
    return 1
  fi
  for r in "${!role_names[@]}"; do printf 'go\n' >&"${go_pipe[r]}"; done
}

# on_ended ROLE INDEX EXIT_CODE REASON [ERROR]: handles the end of a task and checks the completion rules.
on_ended() {
  [[ -z ${task_ended[$1.$2]-} ]] || return 0
  task_ended[$1.$2]=1
  ((ended_tasks += 1, ended_in_role[$1] += 1))
  if (($3 == 0)); then ((succeeded[$1] += 1)); else ((failed[$1] += 1)); fi
  if [[ $4 == stopped ]] && ((!time_limit_near)); then
    decide stopped stop '' '' "$exit_stopped" stopped # someone cancelled the step with scancel
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

# ran_out_of_memory ROLE: true if a task of the role exceeded its memory. Slurm reports this only in srun's
# messages at the end of the step.
ran_out_of_memory() { ((${step_out_of_memory[${step_of[$1]}]})); }

# mark_out_of_memory: if SIGKILL ended the task that decided the outcome and srun's messages name memory as the
# cause, writes the reason out_of_memory to the result file and the task's state file.
mark_out_of_memory() {
  [[ $outcome == failed && -n $deciding_role ]] && ((job_exit == 137)) || return 0
  ran_out_of_memory "$deciding_role" || return 0
  local file
  for file in result "tasks/${role_names[deciding_role]}-$deciding_index.state"; do
    sed 's/^reason=$/reason=out_of_memory/' "$file" | write_atomically "$file"
  done
}

# on_step STEP EXIT_CODE REASON OUT_OF_MEMORY: handles the end of a step's srun. A task without an "ended" report and without
# a final state file is lost.
on_step() {
  local r i
  step_live[$1]=0 step_out_of_memory[$1]=$4
  ((live_steps -= 1))
  for r in ${step_roles[$1]//,/ }; do
    for ((i = 0; i < role_tasks[r]; i++)); do
      [[ -n ${task_ended[$r.$i]-} ]] || on_step_without_report "$r" "$i" "$2" "${3/none/}"
    done
  done
}

# on_step_without_report ROLE INDEX EXIT_CODE REASON: handles the end of a task that has not reported it.
on_step_without_report() {
  local code='' reason='' key value file=tasks/${role_names[$1]}-$2.state
  if grep -qs '^state=ended$' "$file"; then # the task ended; only its report was lost
    while IFS='=' read -r key value; do
      case $key in exit_code) code=$value ;; reason) reason=$value ;; esac
    done <"$file"
  fi
  if [[ -z $code ]]; then
    code=$3 reason=${4:-lost}
    ((code)) || code=$exit_task_lost
    ran_out_of_memory "$1" && reason=out_of_memory
    set_now
    write_task_state "$1" "$2" state=ended "exit_code=$code" "reason=$reason" "ended=$now"
  fi
  on_ended "$1" "$2" "$code" "$reason"
}

# next_event: handles the next report; returns after one second if there is none.
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
    ended) on_ended "$a" "$b" "$c" "$d" "$e${f:+ $f}" ;;
    step) on_step "$a" "$b" "$c" "$d" ;;
    signalled) signalled_by_slurm=1 ;;
  esac
}

# wait_for_steps SECONDS: handles reports until all steps have ended, for at most this long.
wait_for_steps() {
  local deadline=$((SECONDS + $1))
  while ((live_steps > 0 && SECONDS < deadline)); do next_event; done
}

# find_limit_end: sets limit_end, the time at which Slurm ends the job, in seconds since the epoch. The limit may have changed
# since the submission, so Slurm is asked. If it does not reply, its last reply counts, else the limit at submission.
find_limit_end() {
  local end
  end=$(timeout 10 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null | head -n 1)
  if [[ $end == N/A ]]; then # no limit any more; it may be set again
    limit_end=$(($(printf '%(%s)T' -1) + 86400))
  elif [[ -n $end ]] && end=$(date -d "$end" +%s 2>/dev/null); then # date takes an empty text for midnight
    limit_end=$end
  elif [[ -z $limit_end ]]; then
    limit_end=$(($(printf '%(%s)T' -1) - SECONDS + time_limit_s))
  fi
}

# check_time_limit: sends SIGTERM to the tasks grace_s seconds before the time limit. Slurm announces the limit up to
# a minute early, and does not announce a short limit; then limit_check_at, in seconds since the start, is set.
check_time_limit() {
  local left
  ((!time_limit_near && limit_announced && SECONDS >= limit_check_at)) || return 0
  find_limit_end
  left=$((limit_end - $(printf '%(%s)T' -1)))
  if ((left > grace_s + 1)); then
    ((limit_check_at = SECONDS + (left - grace_s < 300 ? left - grace_s : 300))) # the limit may change
    return
  fi
  time_limit_near=1
  log_message "the time limit is near: sending SIGTERM to the tasks"
  end_steps
}

# supervise: handles reports and signals until the outcome is decided.
supervise() {
  if ((limit_signal == 0 && time_limit_s)); then
    limit_announced=1 limit_check_at=$((time_limit_s - grace_s))
  fi
  while check_stop; do
    next_event
    check_time_limit
  done
}

# finish: ends the remaining tasks and exits with the code of the outcome.
finish() {
  if ((stopping)); then
    sleep 0.3 # Slurm signals the processes one after another; start_step may be later than this shell
    while read -t 0 -u "$events"; do next_event; done
  fi
  ((live_steps == 0 || signalled_by_slurm)) || end_steps
  wait_for_steps $((grace_s + 10))
  mark_out_of_memory
  remove_secrets
  # Slurm's accounting should show CANCELLED after a requested stop and TIMEOUT at the time limit. Only Slurm
  # sets these states, so this script cancels the job, or waits for the time limit. After SIGTERM from Slurm
  # it does neither: Slurm has already decided how the job ends, and scancel would undo a requeue.
  if ((stop_requested)); then
    scancel --quiet "$SLURM_JOB_ID"
    sleep 30 &
    wait "$!"
  elif [[ $outcome == failed ]] && ((time_limit_near)); then
    sleep "$((grace_s + 90))" &
    wait "$!"
  fi
  exit "$job_exit"
}

prepare
wait_for_secrets
check_stop && check_directories
check_stop && copy_code
check_stop && log_job
check_stop && make_ssh_keys
check_stop && check_images
check_stop && start_steps
supervise
finish
