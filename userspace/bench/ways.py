#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""np_perf with pinned memory, with libnprdma, and with the preload library, in turns, both ends unpinned
but for the first: medians of the ratios to pinned memory, and whether they are within the limits. Of threads it is
how many times the rate of one thread they reach, beside how many times pinned memory does. Runs in a guest, see scripts/bench.

example: scripts/bench --ways --rounds 7
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

# What: verb, bytes; and with what ratio to pinned memory the library and the preload library have failed.
LATENCY = [("read", 4096), ("write", 4096), ("send", 4096), ("fetch_add", 8)]
BANDWIDTH = [("read", 4096), ("read", 65536), ("write", 4096), ("write", 65536), ("send", 4096), ("send", 65536),
             ("send", 64), ("fetch_add", 8)]
THREADS = 8
LIMITS = {"--lat": {"leases": 1.10, "preload": 1.20}, "--bw": {"preload": 0.80},
          "threads": {"leases": 0.85, "preload": 0.85}}
VALUES = {"--lat": ("t_typical_usec", "us"), "--bw": ("bw_average_mib_per_s", "MiB/s")}


def run(program, preload, verb, size, kind, rounds, threads=1):
    """{mode: result} of one run of np_perf."""
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        done = subprocess.run([program, verb, kind, "-s", str(size), "-n", "5000" if kind == "--lat" else "30000",
                               "-r", str(rounds), "-t", str(threads), "-m", "pinned,leases,preload", "--preload-library", preload,
                               "--json", f.name], check=False, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=600)
        if done.returncode:
            sys.exit(f"ways: np_perf {verb} {kind}: status {done.returncode}\n{done.stdout}")
        return {r["mode"]: r for r in json.load(f)["results"]}


def median(rounds, key):
    values = sorted(x[key] for x in rounds)
    return values[len(values) // 2]


def curve(program, preload, rounds):
    """How many times the rate of one thread THREADS reach, each with a QP and a CQ: a row, beside pinned memory."""
    key = VALUES["--bw"][0]
    one, many = (run(program, preload, "write", 64, "--bw", rounds, threads) for threads in (1, THREADS))
    row = {"verb": "write", "bytes": 64, "what": f"{THREADS} threads / 1", "unit": ""}
    for mode in ("pinned", "leases", "preload"):
        row[mode] = median(many[mode]["rounds"], key) / median(one[mode]["rounds"], key)
        row[f"{mode}_ratio"] = row[mode] / row["pinned"]
    row["met"] = all(row[f"{mode}_ratio"] >= limit for mode, limit in LIMITS["threads"].items())
    return row


def show(row):
    name = f"{row['verb']} {row['bytes']} B {row['what']}"
    print(f"{name:26}"
          f"{row['pinned']:10.4g}{row['leases']:10.4g}{row['preload']:10.4g}{row['unit']:>7}"
          f"{row['leases_ratio']:9.3f}{row['preload_ratio']:9.3f}  {'met' if row['met'] else 'MISSED'}",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--program", required=True, help="np_perf")
    parser.add_argument("--preload", required=True, help="libnprdma-preload.so")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    rows = []
    print(f"{'':26}{'pinned':>10}{'library':>10}{'preload':>10}{'':>7}{'library':>9}{'preload':>9}  of pinned",
          flush=True)
    for kind, tests in (("--lat", LATENCY), ("--bw", BANDWIDTH)):
        key, unit = VALUES[kind]
        for verb, size in tests:
            r = run(args.program, args.preload, verb, size, kind, args.rounds)
            row = {"verb": verb, "bytes": size, "what": "latency" if kind == "--lat" else "bandwidth", "unit": unit}
            verdicts = []
            for mode in ("pinned", "leases", "preload"):
                row[mode] = median(r[mode]["rounds"], key)
                row[f"{mode}_ratio"] = r[mode]["ratio"]
                limit = LIMITS[kind].get(mode)
                if limit:
                    good = r[mode]["ratio"] <= limit if kind == "--lat" else r[mode]["ratio"] >= limit
                    verdicts.append(good)
            row["met"] = all(verdicts)
            rows.append(row)
            show(row)
    rows.append(curve(args.program, args.preload, args.rounds))
    show(rows[-1])
    out = os.environ.get("NPRDMA_OUT")
    if out:
        with open(os.path.join(out, "ways.json"), "w", encoding="utf-8") as f:
            json.dump({"commit": os.environ.get("NPRDMA_COMMIT"), "rounds": args.rounds, "limits": LIMITS,
                       "ways": rows}, f, indent="\t")


if __name__ == "__main__":
    main()
