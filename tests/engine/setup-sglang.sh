#!/bin/sh
# Makes ready SGLang's own scheduler and cache manager for the tests under tests/engine: SGLang for CPUs without its GPU
# kernels, in a virtual environment of its own outside the checkout. It cannot serve a model; its scheduler, radix cache,
# allocators and event recorder run.
#
#   HEADWAY_SGLANG_HOME    where it all goes (default: ~/.cache/headway-sglang; about 1.7 GB)
#   HEADWAY_ENGINE_PYTHON  the Python to make the environment with (default: python3)
#
# pip is used as it is configured on this machine. The first run takes two or three minutes, later ones none.
set -eu

TORCH=2.13.0
SGLANG=0.5.23
HOME_DIR=${HEADWAY_SGLANG_HOME:-$HOME/.cache/headway-sglang}
PYTHON=${HEADWAY_ENGINE_PYTHON:-python3}
SIDE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/sglang-side
VENV=$HOME_DIR/venv
DONE=$HOME_DIR/.installed
# Changes when what is to be installed changes: then an older environment is made anew.
WANTED="torch $TORCH, sglang $SGLANG, recipe 1"

say() { printf 'sglang setup: %s\n' "$*"; }
fail() {
    printf 'sglang setup: %s\n' "$*" >&2
    exit 1
}

mkdir -p "$HOME_DIR" || fail "cannot write to $HOME_DIR"
if [ "$(cat "$DONE" 2>/dev/null)" = "$WANTED" ]; then
    say "SGLang $SGLANG is there, in $HOME_DIR"
    exit 0
fi
started=$(date +%s)
say "installing SGLang $SGLANG without its GPU kernels into $HOME_DIR (once; about 1.7 GB)"
rm -rf "$VENV" "$DONE"
"$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot make a virtual environment (Debian: apt-get install python3-venv)"
pip="$VENV/bin/python -m pip --disable-pip-version-check --quiet --quiet"
$pip install "torch==$TORCH" || fail "pip found no torch $TORCH for $("$VENV/bin/python" -V)"
say "what it needs on a CPU"
$pip install "torch==$TORCH" -r "$SIDE/requirements.txt" || fail "pip could not install what SGLang needs"
# Last and without dependencies: most of what they ask for is compiled for GPUs.
$pip install --no-deps "sglang==$SGLANG" xgrammar==0.2.7 apache-tvm-ffi==0.1.11 ||
    fail "pip found no sglang $SGLANG for this platform"
(cd "$SIDE" && "$VENV/bin/python" -W ignore -c \
    'import absent, sglang.srt.managers.scheduler, sglang.srt.mem_cache.unified_radix_cache') ||
    fail "SGLang is installed, but its scheduler does not load on this machine"
printf '%s\n' "$WANTED" > "$DONE"
say "ready after $(($(date +%s) - started)) s"
