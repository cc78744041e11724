#!/bin/sh
# venv.sh EXTRA: makes .venv (once) and installs this checkout with that extra into it.
# Says what to install where something is missing, instead of ending in a traceback.
set -eu
cd "$(dirname "$0")/.."
extra=$1

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
has_venv() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

# The first that is new enough and can make environments; else the first that is new enough.
find_python() {
    found=
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            if has_venv "$candidate"; then
                command -v "$candidate"
                return
            fi
            found=${found:-$(command -v "$candidate")}
        fi
    done
    echo "$found"
}

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
    python=${PYTHON:-$(find_python)}
    if [ -n "${PYTHON:-}" ] && ! new_enough "$PYTHON"; then
        echo "PYTHON=$PYTHON is no Python of version 3.11 or newer." >&2
        exit 1
    fi
    if [ -z "$python" ]; then
        echo "Headway needs Python 3.11 or newer, and found none (looked for python3, python3.11 ... python3.14)." >&2
        echo "Install it (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3 ..." >&2
        exit 1
    fi
    if ! has_venv "$python"; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        echo "$python cannot make virtual environments: its venv module is missing." >&2
        echo "Install it (Debian, Ubuntu: apt install python3-venv or python$version-venv) and run this again." >&2
        exit 1
    fi
    echo "Creating .venv with $python ..."
    rm -rf .venv
    "$python" -m venv .venv
fi
echo "Installing Headway and what it needs into .venv (a minute or two the first time) ..."
if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"; then
    echo "Installing failed; the lines above say why. Headway needs a package index that pip can reach." >&2
    exit 1
fi
touch ".venv/.installed-$extra"
