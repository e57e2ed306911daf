#!/usr/bin/env bash
# Build the virtual environment: tools/setup.sh FOLDER. Run it again after a change of the pins; what is there stays.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/setup.sh FOLDER}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { if [ -t 1 ]; then printf '\033[1m%s\033[0m\n' "$*"; else echo "$*"; fi; }

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

python_311() {
  for candidate in python3.11 python3 python; do
    if is_311 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "setup: neither python3.11 nor python3 is Python 3.11, which the CPU pins are made for;" \
    "install it (Debian and Ubuntu: python3.11 and python3.11-venv; or pyenv) and run again" >&2
  return 1
}

# One line that counts packages instead of pip's several hundred.
count() {
  awk -v tty="$([ -t 1 ] && echo 1 || echo 0)" '
    /^Collecting |^Requirement already satisfied: / {
      n++
      name = /^Collecting/ ? $2 : $4
      if (tty) printf "\r\033[K  %d %s", n, name
      else if (n % 40 == 0) printf "  %d packages looked at\n", n
      fflush()
    }
    /^Installing collected packages/ { if (tty) printf "\r\033[K"; print "  installing (about a minute)"; fflush() }
    END { if (tty) printf "\r\033[K" }'
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

install() {
  if ! "$venv/bin/python" -m pip install --progress-bar off "$@" 2>"$log" | count; then
    cat "$log" >&2
    echo "setup: pip failed, see above; run again once mended, what is installed stays" >&2
    return 1
  fi
}

if [ ! -x "$venv/bin/pip" ]; then
  python=$(python_311)
  say "[1/4] virtual environment $venv"
  "$python" -m venv "$venv"
elif is_311 "$venv/bin/python"; then
  say "[1/4] virtual environment $venv is there"
else
  echo "setup: $venv is there, but not of Python 3.11; move it away, or name another folder: make setup VENV=..." >&2
  exit 1
fi

# PyPI's torch for Linux carries 3 GB of CUDA libraries. PyTorch's own index has the CPU build of the same version;
# where that index cannot be reached, the build of the configured index serves as well.
say "[2/4] torch for CPU"
torch=$(grep '^torch==' constraints/cpu-py311.txt)
cpu_index=https://download.pytorch.org/whl/cpu
if "$venv/bin/python" -c "import urllib.request as r; r.urlopen('$cpu_index/torch/', timeout=10)" 2>/dev/null; then
  install --no-deps --extra-index-url "$cpu_index" "$torch"
else
  install --no-deps "$torch"
fi

say "[3/4] pinned packages and mua itself"
install --no-warn-conflicts -c constraints/cpu-py311.txt -e '.[cpu,mcp,dev]'

say "[4/4] SGLang, without its CUDA dependencies"
install --no-deps -r constraints/cpu-py311-nodeps.txt
