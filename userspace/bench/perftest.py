#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""Programs of perftest on pinned memory and, under libnprdma-preload on both ends, on
unpinned memory, in turns: medians and their ratios. Runs in a guest, see scripts/bench.

example: scripts/bench --perftest --rounds 7
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

# name: command, and which number of its last line: a median latency in us, or a rate.
TESTS = {
    "READ 4 KiB latency": ("ib_read_lat -s 4096 -n 10000", "lat"),
    "WRITE 4 KiB latency": ("ib_write_lat -s 4096 -n 10000", "lat"),
    "SEND 4 KiB latency": ("ib_send_lat -s 4096 -n 10000", "lat"),
    "atomic 8 B latency": ("ib_atomic_lat -n 10000", "lat"),
    "READ 4 KiB bandwidth": ("ib_read_bw -s 4096 -n 50000", "bw"),
    "WRITE 4 KiB bandwidth": ("ib_write_bw -s 4096 -n 50000", "bw"),
    "SEND 4 KiB bandwidth": ("ib_send_bw -s 4096 -n 50000", "bw"),
    "READ 64 KiB bandwidth": ("ib_read_bw -s 65536 -n 10000", "bw"),
    "WRITE 64 KiB bandwidth": ("ib_write_bw -s 65536 -n 10000", "bw"),
    "SEND 64 KiB bandwidth": ("ib_send_bw -s 65536 -n 10000", "bw"),
    "SEND 64 B rate": ("ib_send_bw -s 64 -n 500000", "rate"),
    "atomic 8 B rate": ("ib_atomic_bw -n 500000", "rate"),
}
# The column of perftest's result, after the size and the number of iterations.
COLUMN = {"lat": 4, "bw": 3, "rate": 4}
UNIT = {"lat": "us", "bw": "MiB/s", "rate": "M/s"}
PORT = 18515


def listening():
    with open("/proc/net/tcp", encoding="ascii") as f:
        found = any(f":{PORT:04X} " in x.split(maxsplit=2)[1] + " " and " 0A " in x for x in f)
    return found


def once(command, kind, preload):
    """One run of both ends: the client's number. None: the CPU's counter and the clock differed."""
    env = dict(os.environ)
    if preload:
        env["LD_PRELOAD"] = preload
    words = command.split()
    with subprocess.Popen(words + ["-d", "mlx5_0"], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True) as server:
        while not listening() and server.poll() is None:
            time.sleep(0.05)
        client = subprocess.run(words + ["-d", "mlx5_1", "localhost"], env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False)
        said = server.communicate(timeout=120)[0]
    if client.returncode or server.returncode:
        if "Correlation coefficient" in client.stdout + said:
            return None
        sys.exit(f"perftest: {command}: client {client.returncode}, server {server.returncode}\n"
                 f"{said}\n{client.stdout}")
    rows = [x.split() for x in client.stdout.splitlines()]
    rows = [x for x in rows if len(x) > 4 and x[0].isdigit() and x[1].isdigit()]
    return float(rows[-1][COLUMN[kind]])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--preload", required=True, help="libnprdma-preload.so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="tests whose names contain this")
    args = parser.parse_args()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    result = {}
    print(f"{'':24}{'pinned':>12}{'preload':>12}{'':>7}{'ratio':>8}", flush=True)
    for name, (command, kind) in TESTS.items():
        if args.only not in name:
            continue
        values = {"pinned": [], "preload": []}
        while len(values["preload"]) < args.rounds:
            pair = [once(command, kind, lib) for lib in (None, args.preload)]
            if None not in pair:
                values["pinned"].append(pair[0])
                values["preload"].append(pair[1])
        row = {k: statistics.median(v) for k, v in values.items()}
        row["ratio"] = row["preload"] / row["pinned"]
        result[name] = row
        print(f"{name:24}{row['pinned']:12.4g}{row['preload']:12.4g}{UNIT[kind]:>7}{row['ratio']:8.3f}",
              flush=True)
    out = os.environ.get("NPRDMA_OUT")
    if out:
        with open(os.path.join(out, "perftest.json"), "w", encoding="utf-8") as f:
            json.dump({"commit": os.environ.get("NPRDMA_COMMIT"), "rounds": args.rounds,
                       "perftest": result}, f, indent="\t")


if __name__ == "__main__":
    main()
