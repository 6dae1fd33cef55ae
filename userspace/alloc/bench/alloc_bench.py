#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""Runs alloc_bench, and shows what an arena costs beside the other ways: ratios of CPU time.

Each way is measured several times, in turns with the others. The quickest counts, because what else the machine does can
only add to it. mlock is what pinning costs; a registration, which costs more, needs an adapter: see np_alloc. A ratio
below 1 means that the arena is quicker. Exit status 1: a bound of --check is not kept.
"""

import argparse
import json
import os
import re
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--repetitions", type=int, default=5)
parser.add_argument("--min-time", default="0.02", help="seconds for each measurement (default 0.02)")
parser.add_argument("--filter", default=".", help="regular expression of alloc_bench's names")
parser.add_argument("--json", help="where to keep what was measured")
parser.add_argument("--check", action="store_true",
                    help="at most 1.2 of plain, 20 ms for 64 GiB, no registrations")
args = parser.parse_args()

bench = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "alloc_bench")
command = [bench, "--benchmark_format=json", f"--benchmark_repetitions={args.repetitions}",
           f"--benchmark_filter={args.filter}", f"--benchmark_min_time={args.min_time}", "--benchmark_enable_random_interleaving=true"]
text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
if args.json:
    with open(args.json, "w", encoding="utf-8") as f:
        f.write(text)
best, once, registrations = {}, {}, 0
for run in json.loads(text)["benchmarks"]:
    name = run["run_name"]
    if run["run_type"] != "iteration":
        continue
    once[name] = run
    if name not in best or run["cpu_time"] < best[name]["cpu_time"]:
        best[name] = run
    if name.startswith("pair/arena"):
        registrations = max(registrations, run["registrations"])

WAYS = ("plain", "carved", "malloc", "mlock")
bad = []
print(f"{'':8}{'bytes':>10}{'threads':>8}{'arena':>10}  time of the arena, of that of")
print(f"{'':8}{'':10}{'':8}{'ns':>10}" + "".join(f"{x:>10}" for x in WAYS))
for name in sorted(best, key=lambda x: [int(y) if y.isdigit() else y for y in re.split(r"[/:]", x)]):
    match = re.match(r"(pair|window)/arena(/bytes:(\d+)(/threads:(\d+))?)$", name)
    if not match:
        continue
    mine = best[name]["cpu_time"]
    line = f"{match[1]:8}{match[3]:>10}{match[5] or 1:>8}{mine:>10.1f}"
    for way in WAYS:
        other = best.get(f"{match[1]}/{way}{match[2]}")
        if way == "mlock" and match[5] == "1":
            other = best.get(f"{match[1]}/{way}/bytes:{match[3]}")
        ratio = mine / other["cpu_time"] if other else None
        line += f"{ratio:>10.3g}" if ratio else f"{'-':>10}"
        if way == "plain" and ratio > 1.2:
            bad.append(f"{name}: {ratio:.2f} of plain")
    print(line)
for name, run in best.items():
    if name.startswith("locate"):
        print(f"{name}: {run['cpu_time']:.1f} ns")
made = best.get("make_64_gib/real_time", {"real_time": 0})["real_time"]
print(f"an arena of 64 GiB, made and ended: {made:.3f} ms")
if trim := once.get("memory_after_trim/iterations:1"):
    print(f"memory: {trim['peak_MiB']:.1f} MiB at most, {trim['used_MiB']:.1f} in use after nine in ten blocks were freed, "
          f"{trim['after_MiB']:.1f} after trim, {trim['empty_MiB']:.1f} when all are freed, "
          f"{trim['registrations']:.0f} registration")
print(f"registrations after the warm-up: {registrations:.0f}")
if made > 20:
    bad.append(f"64 GiB: {made:.1f} ms")
if registrations:
    bad.append(f"{registrations:.0f} registrations")
for line in bad:
    print(f"missed: {line}")
sys.exit(1 if bad and args.check else 0)
