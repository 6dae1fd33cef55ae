#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""The authors' schedule for four workers, computed by numpy, beside what sync-digits does.

usage: simulation.py SYNC-DIGITS

Four workers learn the digits by softmax regression with momentum. At the start of a step
the pairs {0 1} {2 3} and {1 2} {3 0} in turn average their parameters; momentum
stays with its worker. sync-digits does the same between four threads that exchange them. Both
end with the same parameters, up to rounding of 64 bits.
"""

import subprocess
import sys
import tempfile

import numpy as np

FILE = "/usr/lib/python3/dist-packages/sklearn/datasets/data/digits.csv.gz"
WORKERS, EPOCHS, BATCH, RATE, MOMENTUM = 4, 12, 16, 0.1, 0.9


def simulate():
    """The mean of the workers' parameters, as sync-digits lays them out: weights, then biases."""
    lines = np.loadtxt(FILE, delimiter=",")
    training = lines[np.arange(len(lines)) % 5 != 4]
    pixels, digits = training[:, :64] / 16, training[:, 64].astype(int)
    own = len(training) // WORKERS
    weights, biases = np.zeros((WORKERS, 10, 64)), np.zeros((WORKERS, 10))
    speed_w, speed_b = np.zeros_like(weights), np.zeros_like(biases)
    step = 0
    for epoch in range(EPOCHS):
        for begin in range(0, own // BATCH * BATCH, BATCH):
            for pair in ((0, 1), (2, 3)) if step % 2 == 0 else ((1, 2), (3, 0)):
                for x in (weights, biases):
                    x[list(pair)] = x[list(pair)].mean(axis=0)
            for w in range(WORKERS):
                place = np.arange(begin, begin + BATCH) * 1013 + epoch * 31
                batch = place % own * WORKERS + w
                z = pixels[batch] @ weights[w].T + biases[w]
                z = np.exp(z - z.max(axis=1, keepdims=True))
                z /= z.sum(axis=1, keepdims=True)
                z[np.arange(BATCH), digits[batch]] -= 1
                speed_w[w] = MOMENTUM * speed_w[w] + z.T @ pixels[batch] / BATCH
                speed_b[w] = MOMENTUM * speed_b[w] + z.mean(axis=0)
                weights[w] -= RATE * speed_w[w]
                biases[w] -= RATE * speed_b[w]
            step += 1
    return np.concatenate((weights.mean(axis=0).ravel(), biases.mean(axis=0)))


def main():
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 64
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([sys.argv[1], "--threads", str(WORKERS), "--schedule", "pairs", "--double",
                        "--epochs", str(EPOCHS), "--batch", str(BATCH), "--rate", str(RATE),
                        "--momentum", str(MOMENTUM), "--deadline", "120", "--parameters", file.name], check=True)
        theirs = np.loadtxt(file.name)
    ours = simulate()
    if ours.shape != theirs.shape:
        print(f"{theirs.size} parameters and not {ours.size}")
        return 1
    apart = np.abs(ours - theirs).max() / np.abs(ours).max()
    print(f"largest difference {apart:.2g} of the largest parameter, after {EPOCHS} epochs")
    # 264 steps; each one rounds to 1.1e-16, and softmax regression does not amplify it.
    return 0 if apart < 1e-12 else 1


if __name__ == "__main__":
    sys.exit(main())
