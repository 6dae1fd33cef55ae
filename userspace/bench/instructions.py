#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""Counts what the library and the preload library add to a work request, in instructions, by callgrind.

usage: instructions.py DIRECTORY

DIRECTORY is a build of userspace, as ~/.cache/nprdma/userspace/release. Each case of objects_bench and preload_bench is run
twice. What the thread does that posts and polls is counted, without the programs' own functions and those of the unit
tests' HCA; other threads look after leases meanwhile.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

COUNT = 3000
PROGRAMS = {
    "tests/objects_bench": ("read", "write", "send", "atomic", "receive", "read-to-pinned", "send-of-pinned"),
    "tests/preload_bench": ("read", "write", "send", "atomic", "receive"),
}
# The program, and the HCA of the unit tests.
OTHERS = re.compile(r"measured|clock_gettime|fake_|npr::(fake|test)::|testing::")


def count(program, case):
    """Instructions for each request."""
    with tempfile.TemporaryDirectory() as d:
        out = os.path.join(d, "out")
        subprocess.run(["valgrind", "--tool=callgrind", "--separate-threads=yes", f"--callgrind-out-file={out}",
                        "--toggle-collect=measured", program, case, str(COUNT)], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        text = subprocess.run(["callgrind_annotate", "--threshold=100", "--auto=no", "--show-percs=no", out + "-01"],
                              check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    total = 0
    for line in text.splitlines():
        m = re.match(r"\s*([\d,]+)\s+\S*?:(.+?)(?: \[(.*)\])?$", line)
        if m and not OTHERS.match(m[2]) and not os.path.basename(m[3] or "").startswith(("libc.", "libfake_verbs.")):
            total += int(m[1].replace(",", ""))
    return total / COUNT


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if not shutil.which("valgrind"):
        sys.exit("instructions: needs callgrind: apt-get install valgrind")
    for name, cases in PROGRAMS.items():
        program = os.path.join(sys.argv[1], name)
        if not os.access(program, os.X_OK):
            sys.exit(f"instructions: {program} does not exist: run make userspace")
        for case in cases:
            print(f"{os.path.basename(name)} {case}: {count(program, case):.1f} {count(program, case):.1f}", flush=True)


if __name__ == "__main__":
    main()
