#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# Programs that know nothing of unpinned regions, with libnprdma-preload.so, between two HCAs of one
# host: ours, and perftest where memory may not be locked. Others are in tools/testing/compat. Prints TAP.
set -uo pipefail

preload=@LIBNPRDMA@/libnprdma-preload.so
number=0
failed=0
logs=$(mktemp -d)

# run SERVER-COMMAND... -- CLIENT-COMMAND...: both have to succeed. When all is done perftest
# compares the CPU's counter with the clock, and fails if a busy host has made them differ: that
# says nothing of what was done, and it is done again.
run() {
	while ! run_once "$@"; do
		grep -qs '^ *Correlation coefficient' "$logs/server" "$logs/client" || return 1
	done
}

run_once() {
	local server=() client

	while [ "$1" != -- ]; do
		server+=("$1")
		shift
	done
	shift
	client=("$@")
	timeout 120 "${server[@]}" -d mlx5_0 >"$logs/server" 2>&1 &
	# It listens when its port is open, or has failed.
	until ss -Hltn 'sport = :18515' | grep -q . || ! kill -0 $! 2>/dev/null; do
		sleep 0.1
	done
	timeout 120 "${client[@]}" -d mlx5_1 localhost >"$logs/client" 2>&1
	local status=$?
	wait $! && [ $status -eq 0 ]
}

result() {
	number=$((number + 1))
	if [ "$1" -eq 0 ]; then
		echo "ok $number $2"
	else
		echo "not ok $number $2"
		sed 's/^/# server: /' "$logs/server"
		sed 's/^/# client: /' "$logs/client"
		failed=1
	fi
}

ip link set lo up
chmod 666 /dev/infiniband/uverbs*
echo TAP version 13
# Each test would wait for pages that have nowhere to go.
if ! grep -q ^/ /proc/swaps; then
	echo "Bail out! np_preload pages memory out and there is no swap: scripts/vm run --swap 256M gives a guest some"
	exit 1
fi
echo "1..5"
# Regions that the HCA knows by other addresses, and what few programs do with queues. With the
# second the program's own buffer is pinned. Each of its tests has a limit of time.
for bytes in 0 300000; do
	: >"$logs/server"
	env "LD_PRELOAD=$preload" "NPRDMA_UNPINNED=$bytes" "$(dirname "$0")/np_plain" >"$logs/client" 2>&1
	result $? "buffers anywhere, queues at any time, regions of at least $bytes bytes unpinned"
done

# The owner of 16 MiB that are written to may lock 4 MiB.
poor=(setpriv --reuid 65534 --clear-groups --bounding-set=-all prlimit --memlock=4194304)
big=(ib_write_bw -n 5 -s 8388608 -t 2)
if run "${poor[@]}" "${big[@]}" -- "${big[@]}"; then status=1; else status=0; fi
result "$status" "pinned regions need to be allowed"
run "${poor[@]}" env "LD_PRELOAD=$preload" "${big[@]}" -- env "LD_PRELOAD=$preload" "${big[@]}"
result $? "unpinned regions need no such thing"

# Who only reaches regions of others needs no IOMMU.
initiator=$(basename "$(readlink -f /sys/class/infiniband/mlx5_1/device)")
driver=/sys/bus/pci/drivers/mlx5_core
echo "$initiator" >$driver/unbind
echo identity >"/sys/bus/pci/devices/$initiator/iommu_group/type"
echo "$initiator" >$driver/bind
until grep -qs ACTIVE /sys/class/infiniband/mlx5_1/ports/1/state; do
	sleep 0.1
done
chmod 666 /dev/infiniband/uverbs*
: >"$logs/report"
small=(ib_read_lat -F -n 100 -s 65536)
run env "LD_PRELOAD=$preload" "NPRDMA_REPORT=$logs/owner" "${small[@]}" -- \
	env "LD_PRELOAD=$preload" "NPRDMA_REPORT=$logs/report" "${small[@]}" &&
	grep -q ': unpinned$' "$logs/owner" && ! grep -q ': unpinned$' "$logs/report" &&
	[ "$(cat "/sys/bus/pci/devices/$initiator/iommu_group/type")" = identity ]
status=$?
cat "$logs/owner" "$logs/report" >>"$logs/client"
result $status "an initiator needs no IOMMU"
exit $failed
