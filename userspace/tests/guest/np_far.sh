#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# nprdma-far, nprdma-sync and their transport over RDMA: the tests that shared memory passes natively, between two
# adapters, and the same while something else takes the memory that there is, so that what is not pinned goes to
# swap. Prints TAP.
#
#	np_far [transport|far|sync|far-short|sync-short]...
set -uo pipefail

build=@LIBNPRDMA@
transport_test=$build/transport/transport_test
far_test=$build/far/far_test
sync_test=$build/sync/sync_test
export NPRDMA_TEST_VERBS=mlx5_0,mlx5_1
number=0
failed=0
log=$(mktemp)

# of_gtest PREFIX PROGRAM FILTER: each test of it as one of ours, and what it says besides.
of_gtest() {
	local prefix=$1 line status=0

	timeout 400 "$2" --gtest_filter="$3" >"$log" 2>&1 || status=$?
	grep '^# ' "$log"
	# What failed, before the tests that say so.
	[ "$status" -eq 0 ] || grep -A 8 ': Failure$' "$log" | head -n 60 | sed 's/^/# /'
	while read -r line; do
		number=$((number + 1))
		case $line in
		*" OK ]"*) echo "ok $number $prefix${line#*] }" ;;
		*)
			echo "not ok $number $prefix${line#*] }"
			failed=1
			;;
		esac
	done < <(sed -nE 's/^(\[ +(OK|FAILED|SKIPPED) +\] [^ ,]+).*\(.*ms\)$/\1/p' "$log")
	if [ "$status" -ne 0 ] || ! grep -q '^\[  PASSED  \]' "$log"; then
		number=$((number + 1))
		failed=1
		echo "not ok $number $prefix${2##*/} came to its end (status $status)"
		tail -n 20 "$log" | sed 's/^/# /'
	fi
}

ip link set lo up
verbs='Transport/verbs.*:Verbs.*'
over_rdma='Network.*:Far/Codings.*:Far/Protection.*'
# The others need no transport.
groups='Synchroniser/*:Ranges.*:Overlap.*:Wires.*:Groups.*:Agreement.*:Members.*:Processes.*'

# short_of_memory PROGRAM FILTER: most of the memory is one process's, which touches it again and again, and leaves the
# CPUs to others.
short_of_memory() {
	local total swap hog before after
	total=$(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
	swap=$(awk '/^SwapTotal/ { print int($2 / 1024) }' /proc/meminfo)
	python3 -c '
import sys, time
part = 16 << 20
held = bytearray((int(sys.argv[1]) + int(sys.argv[2]) // 4) * (1 << 20) // part * part)
touched = bytes(part // 4096)
while True:
    for at in range(0, len(held), part):
        held[at:at + part:4096] = touched
        time.sleep(0.02)
' "$total" "$swap" &
	hog=$!
	swapped() {
		awk '/^pswpout/ { print $2 }' /proc/vmstat
	}
	# Until it is short; what never happens is told at the end.
	for _ in $(seq 240); do
		if [ "$(swapped)" -gt 0 ] || ! kill -0 "$hog"; then
			break
		fi
		sleep 0.5
	done
	before=$(swapped)
	of_gtest "memory_short." "$1" "$2"
	after=$(swapped)
	number=$((number + 1))
	if kill "$hog" && [ "$after" -gt "$before" ]; then
		echo "ok $number pages_went_to_swap_while_${1##*/}_ran # $((after - before))"
	else
		echo "not ok $number pages_went_to_swap_while_${1##*/}_ran # $((after - before))"
		failed=1
	fi
}

[ $# -gt 0 ] || set -- transport far sync far-short sync-short
for part; do
	case $part in
	transport) of_gtest "" "$transport_test" "$verbs" ;;
	far) of_gtest "" "$far_test" "$over_rdma" ;;
	sync) of_gtest "" "$sync_test" "$groups" ;;
	far-short) short_of_memory "$far_test" "$over_rdma" ;;
	sync-short) short_of_memory "$sync_test" 'Synchroniser/0.*:Ranges.*:Overlap.*:Groups.*' ;;
	*)
		echo "np_far: there is no part $part" >&2
		exit 64
		;;
	esac
done
echo "1..$number"
exit "$failed"
