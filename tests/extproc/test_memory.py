"""What large bodies leave behind in the process's memory."""

import platform
import subprocess
import sys

# Buffers as large as bodies come and go, and something small outlives each.
SCENE = """
import ctypes, sys
from pathlib import Path
from extproc.memory import give_back_large_buffers

def resident_mib():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024

if sys.argv[1] == "told":
    give_back_large_buffers()
kept = []
before = resident_mib()
for _ in range(4):
    buffers = []
    for _ in range(40):
        buffers.append(bytearray(b"x") * (3 << 20))
        kept.append(bytes(1000))
    del buffers
print(resident_mib() - before)
"""


def grown_mib(how: str) -> float:
    done = subprocess.run([sys.executable, "-c", SCENE, how], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_what_small_things_outlive_is_given_back() -> None:
    assert grown_mib("told") < 20
    if platform.libc_ver()[0] == "glibc":
        assert grown_mib("untold") > 40, "it does so by itself: what is it told for?"
