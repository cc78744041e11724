#!/bin/sh
# tests.sh [ARGS OF PYTEST]: what each core can take its part of, then, one after the other, what is marked `alone`.
# The second part is run as well if tests of the first have failed. A part without any tests is no failure, two are.
set -u
NO_TESTS=5 FAILED=1

.venv/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "not alone" "$@"
shared=$?
case $shared in 0 | "$FAILED" | "$NO_TESTS") ;; *) exit "$shared" ;; esac
.venv/bin/python -m pytest -m alone "$@"
alone=$?
[ "$shared" -eq "$NO_TESTS" ] && exit "$alone"
[ "$alone" -eq "$NO_TESTS" ] && alone=0
[ "$alone" -ne 0 ] && exit "$alone"
exit "$shared"
