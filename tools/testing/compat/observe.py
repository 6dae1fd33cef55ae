# SPDX-License-Identifier: GPL-2.0
"""What the guest's kernel does for the programs, seen from outside of them by its trace points.

A program that is killed says nothing, and one whose library did not load says nothing either. The kernel knows who
registered unpinned memory, and which pages of it went.
"""

import os
import re

TRACING = "/sys/kernel/tracing"
# The kernel's function of each registration; a probe at its entry says what is asked for, and one at its end whether it
# was given.
PROBES = ("p:compat/asked np_reg_user_mr start=$arg2:u64 length=$arg3:u64",
          "r:compat/registered np_reg_user_mr result=$retval:u64")
ERROR = (1 << 64) - 4096
# No process has this number: it is the last one that there could be. An empty list would mean all processes.
NOBODY = (1 << 22) - 1


def put(path, text, append=False):
    """Writes to a file of the kernel. Python's open() would look for the end of one to append to, and they have none."""
    fd = os.open(path, os.O_WRONLY | (os.O_APPEND if append else os.O_TRUNC))
    try:
        if text:
            os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)


def make_probes():
    for probe in PROBES:
        put(f"{TRACING}/kprobe_events", probe, True)


class Instance:
    """A trace of its own, of some processes: those of which it is told, and their children and threads."""

    def __init__(self, name, *events):
        self.path = f"{TRACING}/instances/{name}"
        os.makedirs(self.path, exist_ok=True)
        put(f"{self.path}/options/event-fork", "1")
        self.forget()
        for event, condition in events:
            if condition:
                put(f"{self.path}/events/{event}/filter", condition)
            put(f"{self.path}/events/{event}/enable", "1")
        self.pipe = os.open(f"{self.path}/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.rest = b""

    def watch(self, process):
        put(f"{self.path}/set_event_pid", str(process), True)

    def forget(self):
        put(f"{self.path}/set_event_pid", str(NOBODY))

    def watch_all(self):
        put(f"{self.path}/set_event_pid", "")

    def lines(self):
        """What came since the last call."""
        try:
            while chunk := os.read(self.pipe, 1 << 16):
                self.rest += chunk
        except BlockingIOError:
            pass
        *whole, self.rest = self.rest.split(b"\n")
        return [x.decode("ascii", "replace") for x in whole]


class End:
    """One end's registrations."""

    def __init__(self, name):
        self.instance = Instance(f"compat-{name}", ("compat/asked", None), ("compat/registered", None))
        self.begin()

    def begin(self):
        self.instance.forget()
        self.instance.lines()
        self.registered, self.new = 0, []

    def look(self):
        """Counts; and in NEW is (thread, address, length) of what came since somebody has taken it from there."""
        for line in self.instance.lines():
            if (m := re.search(r" registered: .* result=(\d+)", line)) and int(m[1]) < ERROR:
                self.registered += 1
            elif m := re.match(r".*-(\d+) +(?:\( *[\d-]+\) +)?\[.* asked: .* start=(\d+) length=(\d+)", line):
                self.new.append((int(m[1]), int(m[2]), int(m[3])))


class Gone:
    """
    Pages of regions that became absent because memory was reclaimed: by what the evictor did, or a moment after, in a worker, when
    reclaim had asked whether peers use them. What a program does to its own memory is not counted.
    """

    def __init__(self):
        self.instance = Instance("compat-gone", ("nprdma/np_residency", "rights == 0"))
        self.instance.watch_all()

    def begin(self):
        self.instance.lines()

    def end(self, thread):
        """By THREAD, and by workers."""
        return pages_gone(self.instance.lines(), thread)


def pages_gone(lines, thread):
    pages = 0
    for line in lines:
        m = re.match(r" *(.*)-(\d+) +(?:\( *[\d-]+\) +)?\[.* np_residency: .* pages=(\d+)", line)
        if m and (int(m[2]) == thread or m[1].startswith("kworker")):
            pages += int(m[3])
    return pages
