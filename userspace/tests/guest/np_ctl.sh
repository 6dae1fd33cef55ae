#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# npctl beside a process that has unpinned regions: its figures have to be those of the
# kernel, as "rdma" shows them, and agree with each other. With the argument "refused", in a
# guest whose devices are in a passthrough domain: it has to say so, to each process what it may see. Prints TAP.
set -uo pipefail

npctl=@LIBNPRDMA@/npctl
nprping=@LIBNPRDMA@/nprping
tests=0
failed=0
scratch=$(mktemp -d)

# check NAME COMMAND...: it has to succeed; what it prints is shown where it does not.
check() {
	local name=$1

	shift
	tests=$((tests + 1))
	if "$@" >"$scratch/said" 2>&1; then
		echo "ok $tests $name"
	else
		echo "not ok $tests $name"
		sed 's/^/# /' "$scratch/said"
		failed=1
	fi
}

# is FILE EXPRESSION: it is true of j, the JSON of FILE's last line; "ours" are the regions of process $OWNER.
is() {
	python3 - "$@" <<'PYTHON'
import json, os, sys
lines = [json.loads(l) for l in open(sys.argv[1])]
j = lines[-1]
pid = int(os.environ.get("OWNER", "0"))
ours = [r for r in j.get("regions", []) if r["pid"] == pid]
if not eval(sys.argv[2]):
    print(sys.argv[2])
    print(json.dumps(lines, indent=1))
    sys.exit(1)
PYTHON
}

# same_as_rdma: resident, writable, held and leased pages of our region are those that the kernel tells others.
# shellcheck disable=SC2317 # check calls it
same_as_rdma() {
	rdma -j -dd resource show mr >"$scratch/rdma" || return
	"$npctl" mr --interval 0 --json >"$scratch/mr" || return
	python3 - "$scratch/rdma" "$scratch/mr" "$OWNER" <<'PYTHON'
import json, sys
def flat(x):
    return [y for e in x for y in flat(e)] if isinstance(x, list) else [x]
theirs = [r for r in flat(json.load(open(sys.argv[1]))) if r.get("pid") == int(sys.argv[3]) and "drv_region" in r]
ours = [r for r in json.load(open(sys.argv[2]))["regions"] if r["pid"] == int(sys.argv[3])]
def key(device, number, length, region, resident, writable, held, leased):
    return (device, number, length, region, resident * 4096, writable * 4096, held * 4096, leased * 4096)
a = sorted(key(r["ifname"], r["mrn"], r["mrlen"], *(int(r["drv_" + n]) for n in ("region", "resident", "writable", "held", "leased"))) for r in theirs)
b = sorted((r["device"], r["mr"], r["length"], r["region"], r["resident_bytes"], r["writable_bytes"], r["held_bytes"], r["leased_bytes"]) for r in ours)
if not a or a != b:
    print("rdma:", a, "npctl:", b)
    sys.exit(1)
PYTHON
}

# leases_agree: what is pinned by leases of our region is leased to its peer, as his queue pair counts it: there a
# lease counts from when it is asked for until it has ended.
# shellcheck disable=SC2317 # check calls it
leases_agree() {
	"$npctl" mr --interval 0 --json >"$scratch/mr_leases" && "$npctl" qp --json >"$scratch/qp_leases" || return
	python3 - "$scratch/mr_leases" "$scratch/qp_leases" "$OWNER" <<'PYTHON'
import json, sys
leased = sum(r["leased_bytes"] for r in json.load(open(sys.argv[1]))["regions"] if r["pid"] == int(sys.argv[3]))
ends = [q for q in json.load(open(sys.argv[2]))["queue_pairs"] if q["protocol"]]
owner = [q["protocol"] for q in ends if q["pid"] == int(sys.argv[3])]
peer = [q["protocol"] for q in ends if q["pid"] != int(sys.argv[3])]
if len(owner) != 1 or len(peer) != 1 or owner[0]["leased_bytes"] < leased or \
   bool(owner[0]["leased_bytes"]) != bool(owner[0]["leases_granted"]) or peer[0]["leased_bytes"] or \
   peer[0]["leases"] > peer[0]["holds"]:
    print("leased:", leased, "owner:", owner, "peer:", peer)
    sys.exit(1)
PYTHON
}

# fails_with STATUS COMMAND...: it ends with this status, and says why.
# shellcheck disable=SC2317 # check calls it
fails_with() {
	local status=$1

	shift
	"$@" >/dev/null 2>"$scratch/error"
	[ $? -eq "$status" ] && [ -s "$scratch/error" ]
}

# What somebody is told who has no rights and may open the devices: @1 has refusals of others.
others_are_not_shown() {
	check "there are refusals of others" is "$1" 'len(j["records"]) > 0'
	"${poor[@]}" "$npctl" device --json mlx5_0 >"$scratch/poor"
	check "who has no rights is told his own refusal" is "$scratch/poor" \
		'[d["reason"] for d in j["devices"]] == [d["reason"] for d in json.load(open(os.environ["scratch"] + "/device"))["devices"] if d["device"] == "mlx5_0"]'
	"${poor[@]}" "$npctl" why --json mlx5_0 >"$scratch/poor"
	check "who has no rights is told no others" is "$scratch/poor" \
		'j["source"] == "kernel" and j["of_all"] is False and j["records"] == []'
}

poor=(setpriv --reuid 65534 --clear-groups --bounding-set=-all --inh-caps=-all)
export scratch

echo TAP version 13
if [ "${1-}" = refused ]; then
	echo 1..9
	# Whoever may not read the log is told by the kernel all the same.
	echo 1 >/proc/sys/kernel/dmesg_restrict
	cut -d' ' -f1 /proc/uptime >"$scratch/before"
	"$npctl" device --json >"$scratch/device"
	check "a device that serves none says why" is "$scratch/device" \
		'all(d["serves_unpinned_regions"] is False and "passthrough" in d["reason"] and d["bounds"] is None and d["iommu_domain"] == "identity" for d in j["devices"]) and len(j["devices"]) == 2'
	"$npctl" why --json mlx5_0 >"$scratch/refusals"
	check "the refusal is listed" is "$scratch/refusals" \
		'j["source"] == "kernel" and j["records"] and all(r["device"] == "mlx5_0" and "passthrough" in r["text"] for r in j["records"])'
	check "it is that of its process, and of when it ran" is "$scratch/refusals" \
		'j["of_all"] is True and all(r["command"] == "npctl" and r["pid"] > 1 for r in j["records"]) and float(open(os.environ["scratch"] + "/before").read()) - 0.01 <= j["records"][-1]["seconds_since_boot"] <= float(open("/proc/uptime").read().split()[0]) + 0.01'
	others_are_not_shown "$scratch/refusals"
	# More than are kept. Numbers go on, and say what was lost.
	for ((n = 0; n < 70; n++)); do
		"$npctl" device mlx5_0 >/dev/null
	done
	"$npctl" why --json mlx5_0 >"$scratch/many"
	check "the oldest ones are overwritten" is "$scratch/many" \
		'len(j["records"]) == 64 and [r["sequence"] - j["overwritten"] for r in j["records"]] == list(range(1, 65))'
	"$npctl" why --json mlx5_1 >"$scratch/other"
	check "those of another device are not shown" is "$scratch/other" 'j["records"] == []'
	"$npctl" mr --json >"$scratch/mr"
	check "there are no regions" is "$scratch/mr" 'j["regions"] == []'
	exit $failed
fi
echo 1..22

echo auto >/sys/module/ib_core/parameters/nprdma_read_order
"$npctl" device --json >"$scratch/device"
check "each device is listed" is "$scratch/device" \
	'[d["device"] for d in j["devices"]] == sorted(os.listdir("/sys/class/infiniband"))'
check "devices of this guest serve unpinned regions" is "$scratch/device" \
	'all(d["serves_unpinned_regions"] is True and d["bounds"]["max_fault_pages"] > 0 for d in j["devices"])'
check "premises that can be asked about hold" is "$scratch/device" \
	'all([p["holds"] for p in d["premises"]] == [None, True, None, True, True, None] for d in j["devices"])'
check "parameters are those of sysfs" is "$scratch/device" \
	'len(j["parameters"]) == 7 and all(open("/sys/module/%s/parameters/%s" % tuple(n.split("."))).read().strip() == v for n, v in j["parameters"].items())'
echo in-order >/sys/module/ib_core/parameters/nprdma_read_order
"$npctl" device --json mlx5_1 >"$scratch/device"
check "what the administrator says of P1 is told" is "$scratch/device" \
	'len(j["devices"]) == 1 and j["devices"][0]["premises"][0]["holds"] is True'
check "a device that is not there is named" fails_with 1 "$npctl" mr mlx5_9
check "wrong arguments are refused" fails_with 64 "$npctl" mr --interval -1

"$npctl" mr --json --interval 0 >"$scratch/mr"
check "without regions there are none" is "$scratch/mr" \
	'j == {"regions": [], "dead_regions": [], "leased_bytes": 0}'

# It goes on until it is ended: 8 MiB of mlx5_0 that mlx5_1 reads and writes, and that are paged out.
"$nprping" all mlx5_0 mlx5_1 8388608 evict rounds=3000000 >"$scratch/ping" 2>&1 &
ping=$!
trap 'kill $ping 2>/dev/null' EXIT
until "$npctl" mr --json --interval 0 mlx5_0 >"$scratch/mr" && is "$scratch/mr" \
	'any(r["counters"].get("faults_minor", 0) + r["counters"].get("faults_major", 0) > 0 for r in j["regions"])' >/dev/null; do
	kill -0 $ping || break
	sleep 0.2
done
OWNER=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["regions"][0]["pid"])' "$scratch/mr")
export OWNER
mapfile -t all < <(echo $ping; pgrep -P $ping)
check "a region is its process's" is "$scratch/mr" \
	'len(ours) == 1 and ours[0]["command"] == "nprping" and ours[0]["length"] == 8388608 and ours[0]["device"] == "mlx5_0" and ours[0]["keys"] >= 3'
check "resident and absent are all of it" is "$scratch/mr" \
	'ours[0]["resident_bytes"] + ours[0]["absent_bytes"] == ours[0]["length"] and ours[0]["writable_bytes"] <= ours[0]["resident_bytes"]'
check "leases are counted together" is "$scratch/mr" \
	'j["leased_bytes"] == sum(r["leased_bytes"] for r in j["regions"])'
"$npctl" qp --json >"$scratch/all_qps"
check "each end of a connection has a kernel at the other end" is "$scratch/all_qps" \
	'j["not_told"] == {} and sorted((q["device"], q["protocol"]["kernel"] in ("quick", "MAD")) for q in j["queue_pairs"] if q["command"] == "nprping" and q["protocol"]) == [("mlx5_0", True), ("mlx5_1", True)]'
check "queue pairs of other types have none" is "$scratch/all_qps" \
	'any(q["type"] != "RC" for q in j["queue_pairs"]) and all(q["protocol"] is None for q in j["queue_pairs"] if q["type"] != "RC")'
"${poor[@]}" "$npctl" qp --json mlx5_0 >"$scratch/poor"
check "who has no rights is told nothing of queue pairs" is "$scratch/poor" \
	'"CAP_NET_ADMIN" in j["not_told"]["mlx5_0"] and all(q["protocol"] is None for q in j["queue_pairs"])'
# Nobody moves while the two are compared.
kill -STOP "${all[@]}"
check "figures are those of rdma" same_as_rdma
"$npctl" mr --json --interval 0.5 >"$scratch/mr"
check "what stands still has no faults" is "$scratch/mr" 'ours[0]["faults_per_second"] == 0'
check "what is leased of the region is leased to its peer" leases_agree
"$npctl" qp --json mlx5_0 >"$scratch/qp"
check "the owner's queue pair reaches the region" is "$scratch/qp" \
	'[(q["type"], q["state"], q["regions_in_pd"], q["region_bytes_in_pd"], q["command"]) for q in j["queue_pairs"] if q["pid"] == pid] == [("RC", "RTS", 1, 8388608, "nprping")]'
kill -CONT "${all[@]}"

"$npctl" watch --json --interval 0.3 --count 4 >"$scratch/watch"
check "each look is a line, and counters only grow" is "$scratch/watch" \
	'len(lines) == 4 and all(a["regions"][0]["counters"][n] <= b["regions"][0]["counters"][n] for a, b in zip(lines, lines[1:]) for n in a["regions"][0]["counters"])'
# The looks were 0.3 s apart, or more on a busy host.
check "rates are the counters' growth" is "$scratch/watch" \
	'lines[0]["regions"][0]["faults_per_second"] is None and all((grown == rate == 0) or 0.2 < grown / rate < 10 for grown, rate in ((sum(b["regions"][0]["counters"][n] - a["regions"][0]["counters"][n] for n in ("faults_minor", "faults_major")), b["regions"][0]["faults_per_second"]) for a, b in zip(lines, lines[1:])))'
"$npctl" why --json >"$scratch/why"
check "where all is served nothing was refused" is "$scratch/why" \
	'not [r for r in j["records"] if "regions refused" in r["text"]]'
kill "${all[@]}"
wait $ping 2>/dev/null
until "$npctl" mr --json --interval 0 >"$scratch/mr" && is "$scratch/mr" 'not j["regions"] and not j["dead_regions"]' >/dev/null; do
	sleep 0.2
done
check "when the process has gone nothing is left" is "$scratch/mr" 'j["leased_bytes"] == 0'
exit $failed
