#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
"""Compares preload/functions with what libibverbs, libmlx5 and librdmacm export, and with what the preload library does.

usage: functions_test.py TABLE LIBNPRDMA-PRELOAD VERBS.H NM
"""

import ctypes.util
import re
import subprocess
import sys

HOWS = {"hooked", "pinned", "itself", "untouched"}
# Of a libibverbs that is older than the table.
NEWER = {"ibv_query_qp_data_in_order"}


def exported(nm, library):
    out = subprocess.run([nm, "-D", "--defined-only", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    names = set()
    for line in out.splitlines():
        *_, kind, name = line.split()
        name, _, version = name.partition("@")
        if kind != "A" and "PRIVATE" not in version:
            names.add(name)
    return names


def path_of(soname):
    """Where the loader finds it."""
    with open("/proc/self/maps", encoding="ascii") as f:
        ctypes.CDLL(soname)
        f.seek(0)
        return next(line.split()[-1] for line in f if soname.split(".so")[0] + ".so" in line)


def members(header, struct):
    body = re.search(r"struct %s \{\n(.*?)\n\};" % struct, header, re.S).group(1)
    names = re.findall(r"\(\*\s*(\w+)\)\s*\(", body)
    return {n for n in names if "placeholder" not in n.lower() and not n.startswith("_compat")}


def main():
    table, preload, header, nm = sys.argv[1:]
    sections, wrong = {}, []
    with open(table, encoding="ascii") as f:
        for line in f:
            line = line.split("#")[0].strip()
            if line.startswith("["):
                names = sections[line.strip("[]")] = {}
            elif line:
                name, how = line.split()
                if how not in HOWS or name in names:
                    wrong.append(f"{name} {how}: twice, or no such way")
                names[name] = how
    ours = exported(nm, preload)
    functions = {}
    for library in ("libibverbs.so.1", "libmlx5.so.1", "librdmacm.so.1", "libc.so.6"):
        there = exported(nm, path_of(library))
        known = sections[library]
        functions.update(known)
        for name in sorted(there - known.keys()) if library not in ("librdmacm.so.1", "libc.so.6") else ():
            wrong.append(f"{library} exports {name}, which the table does not have")
        for name in sorted(known.keys() - there - NEWER):
            wrong.append(f"{library} does not export {name}")
    for name, how in functions.items():
        if (how in ("hooked", "pinned")) != (name in ours):
            wrong.append(f"{name} is {how}, and the preload library {'has' if name in ours else 'has not'} a function for it")
    for name in sorted(ours - functions.keys()):
        wrong.append(f"the preload library exports {name}, which is no function of theirs")
    with open(header, encoding="utf-8") as f:
        text = f.read()
    for struct in ("ibv_context_ops", "verbs_context"):
        there, known = members(text, struct), sections["struct " + struct].keys()
        for name in sorted(there ^ known):
            wrong.append(f"struct {struct}: {name} is only in {'the header' if name in there else 'the table'}")
    print("\n".join(wrong) or f"{len(functions)} functions")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
