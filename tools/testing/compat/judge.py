# SPDX-License-Identifier: GPL-2.0
"""What a run of a program of others says, and whether the file "reasons" explains it.

A result is what tools/testing/compat/guest says of one program, a dictionary. What is not as it should be is in its
list "findings", each a dictionary of
  kind  "fails"     the program, or one of its tests, failed
        "skips"     one of its tests was skipped
        "pinned"    an end that was to have unpinned memory has none
        "resident"  memory was reclaimed all the time, the program ran for long enough, and no page of a region went
  of    what it is of: a test's name, or "server" or "client"; empty: the program
  text  what is to be told
A program passes if each finding has a reason, and one that is explained stands in the table with it.
"""

import fnmatch
import json
import os
import re

# What a run is called, and how tools/testing/compat/guest is called for it.
RUNS = {
    "pinned": ["--server", "plain", "--client", "plain"],
    "both": [],
    "both-evict": ["--evict"],
    "server": ["--client", "none"],
    "server-evict": ["--client", "none", "--evict"],
    "client": ["--server", "none"],
    "client-evict": ["--server", "none", "--evict"],
}
LAYERS = {"infiniband": "InfiniBand", "ethernet": "RoCE"}
KINDS = ("fails", "pinned", "resident", "skips")
REASONS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reasons")
# A program that ran for less may have had no page to take when the evictor came.
LONG_ENOUGH = 1.0


def finding(kind, of, text):
    return {"kind": kind, "of": of, "text": text}


def run_name(server, client, evict):
    """The name in RUNS of a run in which the ends have these settings."""
    which = {("plain", "plain"): "pinned", ("all", "all"): "both", ("all", "none"): "server", ("none", "all"): "client"}
    return which.get((server, client), f"{server}-{client}") + ("-evict" if evict else "")


class Reasons:
    """
    Lines "LINK LAYER[/RUNS] | PROGRAM | KIND [OF] | REASON": link layer "both" or one of LAYERS, kind one of KINDS; the
    others are patterns. A reason explains what is of nothing less than the program only if it has no OF, and what is of a
    test only if it has one.
    """

    def __init__(self, path=REASONS):
        self.lines = []
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if not line.strip() or line.startswith("#"):
                    continue
                fields = [x.strip() for x in line.split(" | ", 3)]
                kind = fields[2].split() if len(fields) == 4 else []
                layer, _, runs = fields[0].partition("/")
                if not kind or kind[0] not in KINDS or len(kind) > 2 or layer not in ("both", *LAYERS):
                    raise ValueError(f"{path}, line {number}: it is no \"LINK LAYER[/RUNS] | PROGRAM | KIND [OF] | REASON\"")
                self.lines.append((layer, runs or "*", fields[1], kind[0], kind[1] if len(kind) > 1 else "", fields[3]))

    def why(self, layer, run, program, found):
        """The first reason that there is for a finding, or None. One of "any" is what only the table remembers."""
        for of_layer, runs, programs, kind, of, why in self.lines:
            if of_layer not in ("both", layer) or kind != found["kind"] or not fnmatch.fnmatchcase(run, runs) or \
                    not fnmatch.fnmatchcase(program, programs):
                continue
            whole = not found["of"] or found["kind"] == "pinned" and not of
            if found["of"] == "any" or (not of if whole else fnmatch.fnmatchcase(found["of"], of)):
                return why
        return None

    def unexplained(self, layer, run, result):
        """The findings that have failed. On pinned memory, without the library, nothing is judged but what is to fail."""
        if run == "pinned":
            if result.get("pinned_fails") and state(result) == "passes":
                return [finding("fails", "", "it passes, and is here because pinned it does not fit")]
            return []
        return [x for x in result["findings"] if not self.why(layer, run, result["program"], x)]


def state(result):
    """What stands in the table."""
    kinds = {x["kind"] for x in result["findings"]}
    for kind in ("fails", "pinned", "resident"):
        if kind in kinds:
            return kind
    skipped = sum(x["kind"] == "skips" for x in result["findings"])
    return "skipped" if skipped and skipped >= (result.get("tests") or 1) else "passes"


def of_memory(ends, wanted, registered, reports, silent):
    """
    Findings about what memory the ends had. ENDS: those that were processes; WANTED: "all", "none" or "plain" by
    end; REGISTERED: regions that the kernel made unpinned, by end; REPORTS: the ends whose library has told what it
    did; SILENT: those that cannot.
    """
    found = []
    for end in ends:
        want, count = wanted[end], registered[end]
        if want != "all" and count:
            found.append(finding("fails", "", f"the {end} was to have pinned memory, and has {count} unpinned regions"))
        elif want != "plain" and not count and end not in reports and end not in silent:
            found.append(finding("fails", "", f"the {end} has no report of the preload library, and nothing unpinned"))
        elif want == "all" and not count:
            found.append(finding("pinned", end, f"the {end} registered nothing that is unpinned"))
    if "server" not in ends and wanted["server"] == "all" and wanted["client"] != "all":
        found.append(finding("pinned", "server", "one process is both ends, and has the client's setting"))
    return found


def of_tests(tests):
    """Findings about the tests of a run of unittest; TESTS: what programs.UNITTEST prints of them."""
    return [finding("fails", name, f"{name}: {why}") for name, why in tests["failed"]] + \
           [finding("skips", name, f"{name}: {why}") for name, why in tests["skipped"]]


def tests_of(text):
    """What programs.UNITTEST has printed; None: it did not come to that."""
    found = re.findall(r"^(?:client: )?compat-tests: (.*)$", text, re.MULTILINE)
    return json.loads(found[-1]) if found else None


def of_guest(status, plan, results, end, evict):
    """
    What is wrong with a guest's run as a whole, in words. STATUS: of scripts/vm; PLAN: the programs that were to run;
    RESULTS: of those that did, by name; END: what the guest says at its end, or None.
    """
    wrong = []
    missing = [x for x in plan or [] if x not in results]
    if plan is None:
        wrong.append("the guest has not said what it runs")
    if missing:
        wrong.append(f"{len(missing)} of {len(plan)} programs have no result, {missing[0]} the first")
    # 70: the kernel reported a bug, or the time was over, whatever the programs said; 69: there was no guest.
    if status in (69, 70):
        wrong.append(f"exit status {status} of scripts/vm: " +
                     ("the kernel reported a bug, or the time was over" if status == 70 else "no guest could be started"))
    elif end is None:
        wrong.append(f"the guest did not come to its end (exit status {status})")
    elif status != (1 if end["failed"] else 0):
        wrong.append(f"exit status {status}, with {end['failed']} that failed")
    if evict and not missing and end is not None and not end["reclaimed"]:
        wrong.append("nothing was ever reclaimed")
    return wrong
