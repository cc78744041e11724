#!/bin/sh
# LiteLLM in a virtual environment of its own, outside the checkout: it brings some 200 MB, and pins of its own.
#
#   HEADWAY_CLIENTS_HOME    where it goes (default: ~/.cache/headway-clients)
#   HEADWAY_CLIENTS_PYTHON  the Python to make the environment with (default: python3)
set -eu

LITELLM=1.110.2
HOME_DIR=${HEADWAY_CLIENTS_HOME:-$HOME/.cache/headway-clients}
PYTHON=${HEADWAY_CLIENTS_PYTHON:-python3}
DONE=$HOME_DIR/.installed

if [ "$(cat "$DONE" 2>/dev/null)" != "$LITELLM" ]; then
    printf 'clients setup: installing LiteLLM %s into %s (once)\n' "$LITELLM" "$HOME_DIR"
    mkdir -p "$HOME_DIR"
    rm -rf "$HOME_DIR/venv" "$DONE"
    "$PYTHON" -m venv "$HOME_DIR/venv"
    "$HOME_DIR/venv/bin/python" -m pip --disable-pip-version-check --quiet install "litellm==$LITELLM"
    printf '%s\n' "$LITELLM" > "$DONE"
fi
printf 'clients setup: LiteLLM %s is there\n' "$LITELLM"
