# SPDX-License-Identifier: GPL-2.0
"""The programs that tools/testing/compat/guest runs, and how each is called.

A program is a dictionary: "name"; "server" and "client", the commands ("client" alone, if one
command makes both ends); "port", where the server listens (on TCP; None: by rdma_cm). More, if
it applies:
  env, server_env, client_env   variables
  preload     a library that it needs itself, before ours
  serves      the server never ends by itself
  ranks       "client" starts both ends, each by tools/testing/compat/as
  tests       it says what became of each of its tests
  silent      its processes end in a way that leaves the library no time for its report
  limit       of the control group's memory, for both ends
  pinned_fails  pinned, it does not run within that limit: its run without the library has to fail
  before, after  shell commands for what it needs
  check       a command that has to succeed when both ends have
  short, odp  it belongs to these selections
  pause       seconds between two turns of reclaim
"""

import gzip
import os
import re
import shlex
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# With our programs, compiled by "scripts/compat --compile".
OURS = os.environ.get("NPRDMA_COMPAT", HERE)
# rdma-core's tests, as Debian's package has them: the larger files packed.
PACKAGED = "/usr/share/doc/rdma-core/tests"
PYVERBS = "/tmp/compat-pyverbs"
ADDRESSES = ("10.78.80.1", "10.78.80.2")


class Link:
    """What the two ends are called on this link layer."""

    def __init__(self, layer):
        self.ethernet = layer == "ethernet"
        self.gid = [self.find_gid(n) for n in (0, 1)] if self.ethernet else None

    @staticmethod
    def find_gid(n):
        """The index of the RoCE version 2 GID of mlx5_N's IPv4 address."""
        port = f"/sys/class/infiniband/mlx5_{n}/ports/1"
        want = ":".join(["0000"] * 5 + ["ffff"] + ["{:02x}{:02x}".format(*pair) for pair in
                        zip(*[iter(map(int, ADDRESSES[n].split(".")))] * 2)])
        for i in range(256):
            try:
                with open(f"{port}/gids/{i}", encoding="ascii") as f:
                    if f.read().strip() != want:
                        continue
                with open(f"{port}/gid_attrs/types/{i}", encoding="ascii") as f:
                    if f.read().strip() == "RoCE v2":
                        return i
            except OSError:
                continue
        sys.exit(f"compat: mlx5_{n} has no RoCE v2 GID of {ADDRESSES[n]}; the guest needs --link-layer ethernet")

    def pair(self, command, **more):
        """Server and client differ in the device and the server's name."""
        name, option = command, "-g"
        if command.startswith("ib_"):
            # perftest compares the CPU's counter with the clock, and gives no result if a busy host makes
            # them differ; with -F it does not.
            command, option = command + " -F", "-x"
        ends = [f"{command} -d mlx5_{n}" + (f" {option} {self.gid[n]}" if self.gid else "") for n in (0, 1)]
        return {"name": name, "server": ends[0], "client": ends[1] + " localhost", "port": 18515, **more}

    def qperf(self, test):
        # Without rdma_cm it has no way to say which GID.
        where = f"-cm 1 {ADDRESSES[0]}" if self.ethernet else "-li mlx5_1:1 -ri mlx5_0:1 127.0.0.1"
        return {"name": f"qperf {test}", "server": "qperf", "port": 19765, "client": f"qperf -t 1 {where} {test}",
                "serves": True}

    def pyverbs(self, name, module, *args, **more):
        """A test of rdma-core's, or all of a file; each makes both ends. Python is slow to come back to memory."""
        gid = ("--gid", str(self.gid[0])) if self.gid else ()
        return {"name": f"pyverbs {name}", "tests": True, "pause": 0.5, "client": shlex.join(
            ["python3", "-c", UNITTEST, PYVERBS, f"{PYVERBS}/tests", f"tests.{module}", "--dev", "mlx5_0", *gid, "-v",
             *args]), **more}


def ucx(tls, test, **more):
    command = f"ucx_perftest -t {test}"
    return {"name": f"ucx_perftest {tls} {test}", "server": command, "client": f"{command} 127.0.0.1",
            "port": 13337, "env": {"UCX_TLS": tls, "UCX_WARN_UNUSED_ENV_VARS": "n"},
            "server_env": {"UCX_NET_DEVICES": "mlx5_0:1"}, "client_env": {"UCX_NET_DEVICES": "mlx5_1:1"}, **more}


def mpi(program, *args, name=None):
    """One command starts both processes, the first of which is the server."""
    rank = "-x UCX_NET_DEVICES=mlx5_{}:1 {}/as {} {}"
    both = " : ".join(f"-np 1 {rank.format(n, HERE, end, ' '.join((program,) + args))}" for n, end in enumerate(("server", "client")))
    return {"name": name or f"Open MPI {program}", "ranks": True, "client": "mpirun --allow-run-as-root --oversubscribe "
            f"--mca pml ucx --mca osc ucx --mca btl ^openib,tcp,vader {both}",
            "env": {"UCX_TLS": "rc_v", "OMPI_MCA_plm_rsh_agent": "", "UCX_WARN_UNUSED_ENV_VARS": "n"}}


# One file of the tests: all of them together load mlx5dv, by which memory stays pinned. The last line is for judge.tests_of(): what
# unittest prints of a test may have anything in the midst of it.
UNITTEST = """
import json, sys, unittest
sys.path[:0] = sys.argv.pop(1), sys.argv.pop(1)
import args_parser
args_parser.parser.parse_args()
result = unittest.main(module=sys.argv.pop(1), exit=False).result
def named(tests):
    return [[".".join(test.id().split(".")[-2:]), why.strip().split("\\n")[-1]] for test, why in tests]
bad = [[x, "it did not fail"] for x in result.unexpectedSuccesses]
print("\\ncompat-tests: " + json.dumps({"ran": result.testsRun, "failed": named(result.failures + result.errors + bad),
                                      "skipped": named(result.skipped)}), flush=True)
sys.exit(not result.wasSuccessful())
"""


def unpack_pyverbs():
    os.makedirs(f"{PYVERBS}/tests", exist_ok=True)
    for name in os.listdir(PACKAGED):
        plain = name.removesuffix(".gz")
        if plain.endswith(".py"):
            with (gzip.open if plain != name else open)(f"{PACKAGED}/{name}", "rb") as f:
                text = f.read()
            with open(f"{PYVERBS}/tests/{plain}", "wb") as f:
                f.write(text)


def tests_in(module):
    with open(f"{PYVERBS}/tests/{module}.py", encoding="utf-8") as f:
        return re.findall(r"^    def (test_\w+)\(", f.read(), re.MULTILINE)


def pyverbs_tests(link):
    """What the tests of rdma-core have for an adapter with verbs; test_odp by the test."""
    unpack_pyverbs()
    for name in ("addr", "atomic", "cq", "cq_events", "cqex", "device", "flow", "fork", "mr", "parent_domain", "pd",
                 "qp", "qpex", "relaxed_ordering", "rss_traffic", "shared_pd", "tag_matching"):
        yield link.pyverbs(f"test_{name}", f"test_{name}")
    # Each has two processes of its own, at the address of mlx5_0's interface; those of multicast join a group there.
    groups = {"test_rdmacm": [], "test_rdmacm, multicast": []}
    for name in tests_in("test_rdmacm"):
        groups["test_rdmacm, multicast" if "multicast" in name else "test_rdmacm"] += ("-k", f"*.{name}")
    for name, which in groups.items():
        # Its processes are multiprocessing's, which end by os._exit().
        yield link.pyverbs(name, "test_rdmacm", *which, silent=True)
    for name in tests_in("test_odp"):
        yield link.pyverbs(name, "test_odp", "-k", f"*.{name}", odp=True)


def cm(name, server, client, **more):
    """A program of rdma_cm; {a} is the server's address, {b} the client's."""
    a, b = ADDRESSES
    return {"name": name, "server": server.format(a=a, b=b), "client": client.format(a=a, b=b), "port": None, **more}


def fio(name, server, client, port, **more):
    # Without --thread fio's job is a process with a session of its own: nobody sees that it listens, or what it reports.
    common = f"fio --name=job --thread --ioengine=rdma --port={port} --eta=never"
    return cm(name, f"{common} {server}", f"{common} {client} --hostname={{a}}", **more)


PATTERN = "deadbeefcafe4711"
# A file system on a disk of its own; who uses it is not who pays for the disk's memory.
DISK = "/tmp/compat-disk"
MAKE_DISK = (f"fallocate -l 600M {DISK}.image && mkfs.ext4 -q -F {DISK}.image && mkdir -p {DISK} && "
             f"dev=$(losetup -f --show {DISK}.image) && mount $dev {DISK} && losetup -d $dev && "
             # fio maps them as they are
             f"truncate -s 260M {DISK}/server {DISK}/client")
FREE_DISK = f"umount {DISK} && rm {DISK}.image"


def rdma_cm_programs():
    yield cm("rping", "rping -s -a {a} -C 20 -v -V", "rping -c -a {a} -I {b} -C 20 -v -V", short=True)
    yield cm("ucmatose", "ucmatose -b {a} -c 5 -C 50 -S 4096", "ucmatose -b {b} -s {a} -c 5 -C 50 -S 4096")
    yield cm("udaddy", "udaddy -b {a} -c 2 -C 50 -S 1024", "udaddy -b {b} -s {a} -c 2 -C 50 -S 1024")
    yield cm("rdma_server, rdma_client", "rdma_server -s {a} -p 7471", "rdma_client -s {a} -p 7471")
    yield cm("rdma_xserver, rdma_xclient", "rdma_xserver -p 7471", "rdma_xclient -s {a} -p 7471")
    yield cm("rdma_xserver, rdma_xclient, XRC", "rdma_xserver -p 7471 -c x", "rdma_xclient -s {a} -p 7471 -c x")
    for test in ("b", "n", "a"):
        yield cm(f"rstream -T {test}", f"rstream -b {{a}} -T v -T {test} -I 20 -C 5 -S 65536",
                 f"rstream -b {{b}} -s {{a}} -T v -T {test} -I 20 -C 5 -S 65536", short=test == "b")
    yield cm("riostream", "riostream -b {a} -I 5 -C 5 -S 65536", "riostream -b {b} -s {a} -I 5 -C 5 -S 65536")
    for verb in ("write", "read", "send"):
        yield cm(f"ib_{verb}_bw -R", f"ib_{verb}_bw -F -R -n 100 -p 18400", f"ib_{verb}_bw -F -R -n 100 -p 18400 {{a}}")
    # An ordinary program of TCP; what it sent is what was received.
    rsocket = {"preload": "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"}
    yield cm("librspreload: nc, 4 MiB", "sh -c 'nc.traditional -l -s {a} -p 5202 >/tmp/compat-got'",
             "sh -c 'nc.traditional -q 1 -s {b} {a} 5202 </tmp/compat-sent'",
             before="head -c 4M /dev/urandom >/tmp/compat-sent", check="cmp /tmp/compat-got /tmp/compat-sent",
             after="rm -f /tmp/compat-got /tmp/compat-sent", **rsocket)
    for n, verb in enumerate(("write", "read", "send")):
        yield fio(f"fio, verb {verb}", "--rw=read --bs=64k --size=8m --iodepth=16",
                  f"--rw=write --verb={verb} --bs=64k --size=8m --iodepth=8", 8700 + n)
    # --verify of this engine looks at what the server receives, and at nothing else: FIO_UNIDIR has no phase that
    # reads back, and of READs and WRITEs the server has no completions. All receives are there before the first message.
    verified = "--verify=crc32c --bs=64k --size=2m"
    yield fio("fio, verb send, --verify", f"--rw=read {verified} --iodepth=32",
              f"--rw=write --verb=send {verified} --iodepth=8", 8705)
    # So for those the buffers are files, and what is in the one that was written to is looked at.
    small = "--bs=1m --iodepth=16 --size=32m --iomem=mmapshared:/tmp/compat"
    files = "truncate -s 20M /tmp/compat-server /tmp/compat-client"
    yield fio("fio, verb write, data checked", f"--rw=read {small}-server",
              f"--rw=write --verb=write --buffer_pattern=0x{PATTERN} {small}-client", 8706, before=files,
              check=f"{HERE}/blocks /tmp/compat-server {PATTERN}", after="rm /tmp/compat-server /tmp/compat-client")
    yield fio("fio, verb read, data checked", f"--rw=read {small}-server", f"--rw=write --verb=read {small}-client", 8707,
              before=f"{files} && {HERE}/blocks --make /tmp/compat-server {PATTERN}",
              check=f"{HERE}/blocks /tmp/compat-client {PATTERN}", after="rm /tmp/compat-server /tmp/compat-client")
    # Its buffers are files; pinned they do not fit, and those of the client's requests do: what is posted is
    # held. What the client wrote is in the server's file.
    buffers = f"--bs=1m --iodepth=256 --size=256m --buffer_pattern=0x{PATTERN} --iomem=mmapshared:{DISK}"
    yield fio("fio, buffers of 512 MiB in files, in 400 MiB", f"--rw=read {buffers}/server",
              f"--rw=write --verb=write {buffers}/client", 8710, limit="400M", pinned_fails=True, before=MAKE_DISK, after=FREE_DISK,
              check=f"{HERE}/blocks {DISK}/server {PATTERN}")
    machine = "head -c 8M /dev/urandom >/tmp/compat-machine"
    yield cm("qemu-system-x86_64, migration over rdma:", f"{HERE}/migrate to {{a}}:4444 /tmp/compat-machine",
             f"{HERE}/migrate from {{a}}:4444 /tmp/compat-machine", before=machine, after="rm /tmp/compat-machine")
    for end, extra in (("msg", ""), ("rdm", ";ofi_rxm")):
        name = f"fi_pingpong -p verbs{extra} -e {end}"
        command = f"fi_pingpong -p 'verbs{extra}' -e {end} -I 50 -c"
        yield {"name": name, "server": f"{command} -d mlx5_0", "client": f"{command} -d mlx5_1 {ADDRESSES[0]}", "port": 47592}
    yield cm("libfabric, asleep on descriptors", f"{OURS}/fi_sleep {{a}} 7480", f"{OURS}/fi_sleep {{b}} 7480 {{a}}")
    yield cm("io_demo of UCX, rdmacm", "io_demo -q -d 4096:65536 -p 1340", "io_demo -q -i 200 -d 4096:65536 -o read,write -I {b} -p 1340 {a}",
             serves=True, env={"UCX_TLS": "rc_v", "UCX_SOCKADDR_TLS_PRIORITY": "rdmacm", "UCX_WARN_UNUSED_ENV_VARS": "n"})


def perftest(link):
    for verb, more in (("write", ("", "-a", "--use_old_post_send")), ("read", ("", "-a", "-q 4")),
                       ("send", ("", "-a", "-e", "-r 64 -q 2 --use-srq"))):
        for m in more:
            yield link.pair(f"ib_{verb}_bw -n 100 {m}".strip(), short=not m)
        yield link.pair(f"ib_{verb}_lat -n 100", short=True)
    yield link.pair("ib_write_bw -n 100 -c UC")
    yield link.pair("ib_send_bw -n 100 -c UD")
    yield link.pair("ib_send_bw -n 100 -c XRC")
    yield link.pair("ib_write_bw -n 100 -c XRC")
    for verb in ("write", "read", "send"):
        yield link.pair(f"ib_{verb}_bw -n 100 --odp", short=verb == "read", odp=True)
    yield link.pair("ib_send_lat -n 100 -c UD")
    for atomic in ("FETCH_AND_ADD", "CMP_AND_SWAP"):
        yield link.pair(f"ib_atomic_bw -n 100 -A {atomic}", short=atomic[0] == "F")
    yield link.pair("ib_atomic_lat -n 100")
    for verb in ("write", "read", "send"):
        yield link.pair(f"ib_{verb}_bw -n 100 -b")
    for more in ("-l 10 -q 2", "-I 64 -s 64", "--mr_per_qp -q 2", "--use_hugepages"):
        yield link.pair(f"ib_write_bw -n 100 {more}")
    yield link.pair("ib_write_lat -n 100 -c UC")
    yield link.pair("ib_send_bw -n 100 -c UC")
    yield link.pair("ib_send_lat -n 100 -e")
    yield link.pair("ib_send_bw -n 100 -Q 10 -t 64")


def pingpongs(link):
    for kind in ("rc", "uc", "ud", "srq", "xsrq"):
        yield link.pair(f"ibv_{kind}_pingpong -n 100", short=kind != "xsrq")
    yield link.pair("ibv_rc_pingpong -n 100 -e", short=True)
    yield link.pair("ibv_rc_pingpong -n 100 -N")
    for odp in ("-o", "-o -P", "-o -O", "-o -O -P"):
        yield link.pair(f"ibv_rc_pingpong -n 100 -c {odp}", short=odp == "-o", odp=True)
    yield link.pair("ibv_srq_pingpong -n 100 -o", odp=True)


def programs(link):
    yield from perftest(link)
    yield from pingpongs(link)
    for test in ("rc_bi_bw", "rc_bw", "rc_lat", "rc_rdma_read_bw", "rc_rdma_read_lat", "rc_rdma_write_bw",
                 "rc_rdma_write_lat", "rc_rdma_write_poll_lat", "rc_compare_swap_mr", "rc_fetch_add_mr",
                 "uc_bw", "uc_lat", "uc_rdma_write_bw", "uc_rdma_write_lat", "ud_bw", "ud_lat"):
        yield dict(link.qperf(test), short=test == "rc_rdma_read_bw")
    for tls in ("rc_v", "ud_v", "rc_x", "ud_x"):
        for test in ("tag_lat", "tag_bw", "ucp_put_lat", "ucp_put_bw", "ucp_get", "ucp_add"):
            yield ucx(tls, f"{test} -n 300 -w 10", short=test == "tag_bw")
        yield ucx(tls, "tag_bw -n 50 -w 5 -s 262144")
        yield ucx(tls, "ucp_put_bw -n 100 -w 5 -s 8192")
    # It sleeps on the descriptor of the completion channel.
    for tls in ("rc_v", "ud_v"):
        yield ucx(tls, "tag_lat -n 100 -w 5 -E sleep", short=tls == "rc_v")
    yield dict(ucx("rc_v", "ucp_get -n 100 -w 5 -s 65536"), name="ucx_perftest rc_v ucp_get, ODP", odp=True,
               env={"UCX_TLS": "rc_v", "UCX_REG_NONBLOCK_MEM_TYPES": "host", "UCX_WARN_UNUSED_ENV_VARS": "n"})
    yield dict(mpi(f"{OURS}/exchange", name="Open MPI, pml ucx: exchange"), short=True)
    # Pinned it would need 8 GiB.
    yield dict(mpi(f"{OURS}/window", "4", name="Open MPI windows of 4 GiB in 512 MiB"), limit="512M", pinned_fails=True)
    if link.ethernet:
        yield from rdma_cm_programs()
    if os.path.isdir(PACKAGED):
        yield from pyverbs_tests(link)
