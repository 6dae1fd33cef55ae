#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""Runs sync-digits and sync_bench, and draws what they say; see -h.

usage: figures.py PROGRAMS DIRECTORY

PROGRAMS is the build directory of userspace/sync. DIRECTORY gets sync.json, with every
number, and the plots. Workers are threads of one machine over the shared-memory transport. Where a link is
emulated, it is so slow that the machine's own time hardly counts.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tempfile

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Of each worker: bytes per second, microseconds.
LINK = ["--link-rate", "4e6", "--link-latency", "3000"]
LINK_TEXT = "each worker's link emulated: 4 MB/s, 3 ms"
EPOCHS = 40
SAID = re.compile(r"loss (\S+), accuracy (\S+) of the mean of all and (\S+) of each, (\d+) steps, (\S+) s of which "
                  r"(\S+) synchronising, (\d+) bytes")
WAYS = {"grid": ["--schedule", "grid"], "all-reduce": ["--schedule", "full", "--exchange", "halving-doubling"],
        "local": ["--schedule", "local"]}
COLOURS = {"grid": "C0", "all-reduce": "C1", "local": "C2", "ring": "C3", "halving-doubling": "C1", "direct": "C4"}


class Programs:
    def __init__(self, directory):
        self.directory = directory

    def run(self, program, *options):
        command = [os.path.join(self.directory, program), *options]
        print("  " + " ".join(command), flush=True)
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def learn(self, model, workers, *options, epochs=EPOCHS):
        """What sync-digits says at the end, and its epochs."""
        with tempfile.NamedTemporaryFile("r") as file:
            text = self.run("sync-digits", "--threads", str(workers), "--model", model, "--epochs", str(epochs),
                            "--deadline", "300", "--curve", file.name, *options)
            curve = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
        loss, accuracy, own, steps, seconds, synchronising, sent = SAID.search(text).groups()
        return {"model": model, "workers": workers, "options": options, "loss": float(loss),
                "accuracy": float(accuracy), "accuracy_of_each": float(own), "steps": int(steps),
                "seconds": float(seconds), "synchronising": float(synchronising), "bytes": int(sent), "curve": curve}

    def time(self, *options):
        rows = list(csv.DictReader(io.StringIO(self.run("sync_bench", *options))))
        return [{"workers": int(r["workers"]), "exchange": r["exchange"], "parameters": int(r["parameters"]),
                 "seconds": float(r["seconds"]), "bytes": int(r["bytes"])} for r in rows]


def accuracy(programs):
    """For each model, number of workers and way; and for the ways to send less."""
    rows = []
    for model in ("logistic", "network"):
        for workers in (4, 9, 16):
            for way, options in WAYS.items():
                rows.append({"way": way, **programs.learn(model, workers, *options)})
    for way, options in {"grid, 16 bits": ["--wire", "int16"], "grid, 8 bits": ["--wire", "int8"],
                         "grid, a quarter in each step": ["--parts", "4"], "grid, overlapped": ["--overlap"],
                         "random groups of 4": ["--schedule", "random:4:1"], "random pairs": ["--schedule", "random:2:1"],
                         "random pairs, full every 8": ["--schedule", "random:2:1+full:8"]}.items():
        rows.append({"way": way, **programs.learn("network", 16, *options)})
    return rows


def plot_steps(rows, path):
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.5), sharex="col", sharey="row")
    for line, model in zip(axes, ("logistic", "network")):
        for axis, workers in zip(line, (4, 9, 16)):
            for row in rows:
                if (row["model"], row["workers"]) == (model, workers) and row["way"] in WAYS:
                    axis.plot([e["steps"] for e in row["curve"]], [e["loss"] for e in row["curve"]],
                              COLOURS[row["way"]], label=f"{row['way']}: {row['accuracy']:.3f}")
            axis.set_yscale("log")
            axis.set_title(f"{model}, {workers} workers", fontsize=10)
            axis.legend(fontsize=8, title="accuracy of the mean", title_fontsize=8)
    for axis in axes[1]:
        axis.set_xlabel("steps")
    for axis in axes[:, 0]:
        axis.set_ylabel("loss of the training data")
    save(figure, path)


def plot_time(rows, path):
    figure, axis = plt.subplots(figsize=(7, 4.5))
    for row in rows:
        axis.plot([e["seconds"] for e in row["curve"]], [e["loss"] for e in row["curve"]], COLOURS.get(row["way"], "C5"),
                  label=f"{row['way']}: {row['synchronising'] / row['steps'] * 1e3:.0f} ms a synchronisation")
    axis.set_yscale("log")
    axis.set_xlabel(f"seconds ({LINK_TEXT})")
    axis.set_ylabel("loss of the training data")
    axis.set_title("network, 16 workers", fontsize=10)
    axis.legend(fontsize=8)
    save(figure, path)


def plot_step_time(by_workers, by_group, by_size, path):
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.3))
    for way in ("grid", "ring", "halving-doubling", "direct"):
        some = [r for r in by_workers if r["exchange"] == way]
        axes[0].plot([r["workers"] for r in some], [r["seconds"] * 1e3 for r in some], "o-", color=COLOURS[way], label=way)
    axes[0].set_xlabel("workers")
    axes[0].set_title("2506 parameters", fontsize=10)
    groups = sorted((int(r["exchange"].split(":")[1]) if ":" in r["exchange"] else 16, r["seconds"] * 1e3)
                    for r in by_group if r["exchange"].startswith(("random", "full")))
    axes[1].plot(*zip(*groups), "o-", color=COLOURS["grid"], label="groups")
    for way in ("ring", "halving-doubling"):
        at = next(r["seconds"] * 1e3 for r in by_group if r["exchange"] == way)
        axes[1].axhline(at, color=COLOURS[way], ls="--", label=way)
    axes[1].set_xlabel("size of a group, of 16 workers")
    axes[1].set_title("2506 parameters", fontsize=10)
    for link, style in (("emulated", "-"), ("native", ":")):
        some = {}
        for r in by_size[link]:
            some.setdefault(r["parameters"], {})[r["exchange"]] = r["seconds"]
        for baseline, colour in (("the best of ring and halving-doubling", "C1"), ("direct", "C4")):
            ratio = [s["grid"] / (s["direct"] if baseline == "direct" else min(s["ring"], s["halving-doubling"]))
                     for s in some.values()]
            axes[2].plot(list(some), ratio, style + "o", color=colour, label=f"{link}, over {baseline}")
    axes[2].axhline(0.6, color="grey", lw=0.8)
    axes[2].set_xscale("log")
    axes[2].set_ylim(0, 1.2)
    axes[2].set_xlabel("parameters, 16 workers in groups of 4")
    axes[2].set_title("time of a synchronisation / of a full all-reduce", fontsize=10)
    for axis in axes[:2]:
        axis.set_ylabel("ms for a synchronisation")
        axis.set_ylim(bottom=0)
    for axis in axes:
        axis.legend(fontsize=7)
    figure.suptitle(LINK_TEXT, fontsize=9)
    save(figure, path)


def plot_bytes(rows, path):
    figure, axis = plt.subplots(figsize=(7, 4))
    some = [r for r in rows if r["model"] == "network" and r["workers"] == 16 and r["way"] != "local"]
    axis.barh([f"{r['way']} ({r['accuracy']:.3f})" for r in some], [r["bytes"] / r["steps"] / 16 / 1e3 for r in some])
    axis.invert_yaxis()
    axis.set_xlabel("kB that a worker sends in a step (accuracy of the mean at the end)")
    axis.set_title("network of 2506 parameters, 16 workers", fontsize=10)
    save(figure, path)


def save(figure, path):
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main():
    if len(sys.argv) != 3:
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 64
    programs, directory = Programs(sys.argv[1]), sys.argv[2]
    os.makedirs(directory, exist_ok=True)
    found = {"link": LINK_TEXT, "epochs": EPOCHS}
    found["accuracy"] = accuracy(programs)
    found["over_time"] = [{"way": way, **programs.learn("network", 16, *options, *LINK, epochs=20)}
                          for way, options in {**WAYS, "grid, overlapped": ["--overlap"]}.items()]
    found["by_workers"] = programs.time("--workers", "4", "9", "16", "--repetitions", "9", *LINK)
    found["by_group"] = programs.time("--schedules", "random:2:1", "random:4:1", "random:8:1", "full", "--repetitions", "9", *LINK)
    sizes = ["--parameters", "650", "2506", "10000", "40000", "160000"]
    found["by_size"] = {"emulated": programs.time(*sizes, "--repetitions", "9", *LINK),
                        "native": programs.time(*sizes, "1000000", "--repetitions", "15")}
    with open(os.path.join(directory, "sync.json"), "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    draw(found, directory)
    return 0


def draw(found, directory):
    plot_steps(found["accuracy"], os.path.join(directory, "sync-steps.png"))
    plot_time(found["over_time"], os.path.join(directory, "sync-time.png"))
    plot_step_time(found["by_workers"], found["by_group"], found["by_size"], os.path.join(directory, "sync-cost.png"))
    plot_bytes(found["accuracy"], os.path.join(directory, "sync-bytes.png"))


if __name__ == "__main__":
    sys.exit(main())
