#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""Runs alloc_bench, and shows what an arena costs beside the other ways: ratios of CPU time.

Each way is measured several times, in turns with the others. The quickest counts, because what else the machine does can
only add to it. mlock is what pinning costs, within ulimit -l; a registration, which costs more, needs an adapter: see
np_alloc. A ratio below 1 means that the arena is quicker. What --filter leaves out is not shown. Exit status 1: a
bound of --check is not kept, or was not measured.
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
best, once, skipped, registrations = {}, {}, {}, None
for run in json.loads(text)["benchmarks"]:
    name = run["run_name"]
    if run["run_type"] != "iteration":
        continue
    if run.get("error_occurred"):
        skipped[name] = run["error_message"]
        continue
    once[name] = run
    if name not in best or run["cpu_time"] < best[name]["cpu_time"]:
        best[name] = run
    if name.startswith("pair/arena"):
        registrations = max(registrations or 0, run["registrations"])

WAYS = ("plain", "carved", "malloc", "mlock")
bad, plain = [], []
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
        if way == "plain":
            plain.append(ratio)
            if ratio and ratio > 1.2:
                bad.append(f"{name}: {ratio:.2f} of plain")
    print(line)
for name, why in sorted(skipped.items()):
    print(f"not measured: {name}: {why}")
for name, run in best.items():
    if name.startswith("locate"):
        print(f"{name}: {run['cpu_time']:.1f} ns")
made = best.get("make_64_gib/real_time")
if made:
    print(f"an arena of 64 GiB, made and ended: {made['real_time']:.3f} ms")
    if made["real_time"] > 20:
        bad.append(f"64 GiB: {made['real_time']:.1f} ms")
for name, trim in once.items():
    if match := re.match(r"memory_after_trim/bytes:(\d+)/left:(\d+)/", name):
        what = f"blocks of {match[1]} bytes" if match[1] != "0" else "blocks of 1 byte to 64 KiB"
        print(f"{what}: {trim['peak_MiB']:.1f} MiB in memory; {match[2]} % left, at random: {trim['used_MiB']:.1f} in use, "
              f"{trim['after_MiB']:.1f} in memory after trim; all freed: {trim['empty_MiB']:.1f}; "
              f"{trim['registrations']:.0f} registration")
if registrations is not None:
    print(f"registrations after the warm-up: {registrations:.0f}")
if registrations:
    bad.append(f"{registrations:.0f} registrations")
for line in bad:
    print(f"missed: {line}")
if args.check and (not made or registrations is None or not plain or None in plain):
    print("not measured: all that --check needs; give it no --filter")
    bad.append("")
sys.exit(1 if bad and args.check else 0)
