#!/usr/bin/env bash
# Build the virtual environment: tools/setup.sh FOLDER. Run it again after a change of the pins; what is there stays.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/setup.sh FOLDER}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { if [ -t 1 ]; then printf '\033[1m%s\033[0m\n' "$*"; else echo "$*"; fi; }

is_312() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

python_312() {
  local pyenv=${PYENV_ROOT:-$HOME/.pyenv} uv
  for candidate in python3.12 python3 python "$pyenv"/versions/3.12*/bin/python3.12; do
    if is_312 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  # uv may have one already; without one it downloads it.
  if command -v uv >/dev/null && uv=$(uv python find 3.12 2>/dev/null || { uv python install 3.12 >&2 && uv python find 3.12; }) \
    && is_312 "$uv"; then
    echo "$uv"
    return
  fi
  echo "setup: no Python 3.12 with venv as python3.12, as python3, in $pyenv/versions or through uv; install one" \
    "(Debian and Ubuntu: apt-get install python3.12 python3.12-venv; pyenv: pyenv install 3.12; or uv) and run again" >&2
  return 1
}

# Of what uv says, the large downloads as they begin, and how many packages were installed.
of_uv() {
  awk '
    /^ *Downloading .*\([0-9.]+MiB\)/ {
      size = $NF; gsub(/[^0-9.]/, "", size)
      if (size + 0 >= 50) { printf "  downloading %s, %d MB\n", $(NF - 1), size; fflush() }
    }
    /^Installed / { print "  " tolower(substr($0, 1, 1)) substr($0, 2) }'
}

# One line that counts packages instead of pip's several hundred.
of_pip() {
  awk -v tty="$([ -t 1 ] && echo 1 || echo 0)" '
    /^Collecting |^Requirement already satisfied: / {
      n++
      name = /^Collecting/ ? $2 : $4
      if (tty) printf "\r\033[K  %d %s", n, name
      else if (n % 40 == 0) printf "  %d packages looked at\n", n
      fflush()
    }
    /^The conflict is caused by:/ { conflict = 1 }
    /^$/ { conflict = 0 }
    conflict { print (tty ? "\r\033[K" : "") $0 >"/dev/stderr" }
    /^Installing collected packages/ { if (tty) printf "\r\033[K"; print "  installing (minutes)"; fflush() }
    END { if (tty) printf "\r\033[K" }'
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

# uv reads no configuration of pip's: it gets pip's index and certificates. What it still cannot do, pip may. pip's `config
# get` reads one file alone, never /etc/pip.conf; `config list` has all files and variables together.
uv_reads_pips_settings() {
  local settings name key section value
  settings=$("$venv/bin/python" -m pip config list 2>/dev/null) || return 0
  while read -r name key; do
    for section in :env: install global; do
      value=$(sed -n "s/^$section\\.$key='\\(.*\\)'\$/\\1/p" <<< "$settings")
      if [ -n "$value" ] && [ -z "${!name:-}" ]; then export "$name=$value"; fi
    done
  done <<< $'UV_DEFAULT_INDEX index-url\nSSL_CERT_FILE cert'
}

install() {
  local uv=("$venv/bin/python" -m uv pip install --no-progress --python "$venv/bin/python")
  if [ -x "$venv/bin/uv" ]; then
    if "${uv[@]}" "$@" 2>&1 >/dev/null | tee "$log" | of_uv; then
      return
    fi
    echo "  uv could not ($(grep -m 1 -i -E 'error|cause' "$log" || tail -n 1 "$log")): pip tries"
  fi
  if ! "$venv/bin/python" -m pip install --progress-bar off --no-warn-conflicts "$@" 2>"$log" | of_pip; then
    grep -v '^WARNING' "$log" >&2
    echo "setup: pip could not install the pins of constraints/, see above; run again once that is fixed, what is" \
      "installed stays" >&2
    return 1
  fi
}

if [ ! -x "$venv/bin/pip" ]; then
  python=$(python_312)
  say "[1/4] virtual environment $venv"
  "$python" -m venv "$venv"
elif is_312 "$venv/bin/python"; then
  say "[1/4] virtual environment $venv is there"
else
  version=$("$venv/bin/python" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo unknown)
  echo "setup: $venv is there, but of Python $version instead of 3.12; move it away (mv $venv $venv.old), or name" \
    "another folder: make setup VENV=..." >&2
  exit 1
fi

# uv downloads several packages at once: half a minute instead of three.
uv_reads_pips_settings
if [ ! -x "$venv/bin/uv" ]; then
  "$venv/bin/python" -m pip install -q -c constraints/cpu-py312.txt uv 2>/dev/null || echo "  without uv: pip installs all"
fi

# PyPI's torch for Linux carries its CUDA libraries. PyTorch's own index has the CPU build of the same version; where
# that index cannot be reached, PyPI's serves as well.
say "[2/4] torch for CPU"
mapfile -t torch < <(grep -E '^(torch|torchvision)==' constraints/cpu-py312.txt)
cpu_index=https://download.pytorch.org/whl/cpu
if "$venv/bin/python" -c "import torch, torchvision" 2>/dev/null &&
  "$venv/bin/python" -c "import sys, torch; sys.exit('torch==' + torch.__version__.split('+')[0] != '${torch[0]}')"; then
  echo "  there already"
elif "$venv/bin/python" -c "import urllib.request as r; r.urlopen('$cpu_index/torch/', timeout=10)" 2>/dev/null; then
  install --no-deps --index-url "$cpu_index" "${torch[@]}"
else
  echo "  PyTorch's CPU index cannot be reached: PyPI's build, with its CUDA libraries, takes 5.4 GB of disk"
  install -c constraints/gpu-py312-cu.txt "${torch[0]}"
  install --no-deps "${torch[1]}"
fi

say "[3/4] pinned packages and mua itself"
install -c constraints/cpu-py312.txt -e '.[cpu,tools,parquet,postgres,dev,docs]'

say "[4/4] SGLang, without its CUDA dependencies"
install --no-deps -r constraints/cpu-py312-nodeps.txt
