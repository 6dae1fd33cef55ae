#!/bin/bash
# SPDX-License-Identifier: GPL-2.0
#
# np_perf: each verb in each mode, with all data looked at, on one host and between two processes
# that meet at a TCP port; and what it does when it cannot do what it is asked for. Prints TAP.
set -uo pipefail

np_perf=@LIBNPRDMA@/tools/np_perf/np_perf
# Each verb by the library and by plain verbs, which are those of "pinned" in "preload" as well. With leases and
# without it is the same code of np_perf, so they take turns. READ and WRITE have bandwidth in later checks.
declare -A library=([write_imm]=optimistic [send]=leases [fetch_add]=leases [cmp_swap]=optimistic)
verbs=(write_imm send fetch_add cmp_swap)
number=0
failed=0
logs=$(mktemp -d)

result() {
	number=$((number + 1))
	if [ "$1" -eq 0 ]; then
		echo "ok $number $2"
	else
		echo "not ok $number $2"
		sed 's/^/# /' "$logs"/*
		failed=1
	fi
	rm -f "$logs"/*
}

# modes_are_right N: N modes were measured, with no mismatch in any.
modes_are_right() {
	[ "$(grep -cE '^ [0-9]+ +[0-9]+ .* to [0-9]+\.[0-9]{3}\)$' "$logs/out")" -eq "$1" ] &&
		[ "$(grep -c '[:,] 0 mismatches$' "$logs/out")" -eq "$1" ]
}

# measured N ARGUMENT...
measured() {
	local modes=$1
	shift

	timeout 60 "$np_perf" "$@" -r 1 --verify >"$logs/out" 2>"$logs/err" &&
		modes_are_right "$modes" && [ ! -s "$logs/err" ]
}

# Two processes, each of which knows the other by a TCP port only: between_hosts N ARGUMENT...
between_hosts() {
	local modes=$1
	shift

	timeout 60 "$np_perf" --listen 5000 -d mlx5_0 >"$logs/server" 2>&1 &
	until grep -q listens "$logs/server" || ! kill -0 $! 2>/dev/null; do
		sleep 0.05
	done
	measured "$modes" "$@" localhost -p 5000 -d mlx5_1
	local status=$?
	wait $! && [ "$status" -eq 0 ]
}

# refused REASON ARGUMENT...
refused() {
	local reason=$1
	shift

	! timeout 60 "$np_perf" "$@" >"$logs/out" 2>"$logs/err" && grep -q -- "$reason" "$logs/err"
}

json_is_right() {
	measured 2 read -n 50 -s 2,8192 --warm 0.02 -m pinned --json "$logs/json" --histogram &&
		grep -q '^# histogram: 8192 bytes, pinned' "$logs/out" &&
		grep -q '{"bytes": 2, "mode": "pinned",' "$logs/json" &&
		grep -q '{"bytes": 8192, "mode": "pinned",' "$logs/json" &&
		[ "$(grep -c '{"iterations": 50, "t_min_usec": ' "$logs/json")" -eq 2 ] &&
		[ "$(grep -o '"count": [0-9]*' "$logs/json" | awk '{ n += $2 } END { print n }')" -eq 100 ]
}

# All of the target is paged out, comes back by major faults, and is what it was.
absent_memory_comes_back() {
	measured 2 read --bw -s 4096 -w 4 -n 400 --span 1M --random --absent 100 -m pinned,preload &&
		grep -q '^# pinned: target absent 0 %' "$logs/out" &&
		grep -qE '^# preload: target absent (9[0-9]|100) %,.* [1-9][0-9]* major' "$logs/out"
}

unmapped_memory_comes_back() {
	measured 1 write --bw -s 4096 -w 4 -n 400 --span 1M --absent 50 --local-absent 50 --minor -m leases &&
		grep -qE 'target absent [45][0-9] %, client absent [45][0-9] %,.* target [1-9][0-9]* minor' "$logs/out"
}

reclaimed_memory_comes_back() {
	measured 1 write --bw -s 4096 -w 4 -D 0.5 --span 8M --random --pressure both -m optimistic &&
		grep -qE '^# optimistic: [1-9][0-9]* KiB reclaimed' "$logs/out" &&
		! compgen -G '/sys/fs/cgroup/np_perf.*' >"$logs/groups"
}

# A listener says no to those who do not speak its language, and goes on.
strangers_are_turned_away() {
	timeout 60 "$np_perf" --listen 5001 -d mlx5_0 >"$logs/server" 2>"$logs/err" &
	until grep -q listens "$logs/server" || ! kill -0 $! 2>/dev/null; do
		sleep 0.05
	done
	# No protocol at all; the head of a hello that is not all there; a hello of zeros.
	exec 3<>/dev/tcp/127.0.0.1/5001 && printf 'GET / HTTP/1.0\r\n\r\n' >&3 && cat <&3 >"$logs/said.1" 2>/dev/null
	exec 3<>/dev/tcp/127.0.0.1/5001 && printf 'NPPF\0\1\0\1\0\0\1\0' >&3 && exec 3>&-
	exec 3<>/dev/tcp/127.0.0.1/5001 && printf 'NPPF\0\1\0\1\0\0\0\10\0\0\0\0\0\0\0\0' >&3 && cat <&3 >"$logs/said.3" 2>/dev/null
	exec 3>&-
	timeout 60 "$np_perf" read localhost -p 5001 -d mlx5_1 -r 1 -n 10 -m pinned >"$logs/out" 2>&1 && wait $! &&
		[ "$(grep -c 'a connection is refused' "$logs/err")" -eq 3 ] &&
		grep -qa 'does not speak' "$logs/said.1" && grep -qa 'hello' "$logs/said.3"
}

# No lease is granted where none is to be, and some where they may be.
leases_are_where_they_belong() {
	measured 2 write --bw -s 4096 -w 4 -n 400 --warm 0 -m optimistic,leases --json "$logs/json" &&
		grep -A2 '"mode": "optimistic"' "$logs/json" | grep -q '"leases": 0,' &&
		grep -A2 '"mode": "leases"' "$logs/json" | grep -q '"leases": [1-9]'
}

# A run that is ended takes its processes with it.
ended_runs_leave_nothing() {
	local run ends tries=100

	"$np_perf" write --bw -D 30 -r 1 -m optimistic >"$logs/out" 2>&1 &
	run=$!
	until mapfile -t ends < <(pgrep -P $run) && [ ${#ends[@]} -eq 2 ]; do
		kill -0 $run 2>/dev/null || return
		sleep 0.05
	done
	kill -TERM $run
	! wait $run || return
	while ps -o stat= -p "${ends[0]},${ends[1]}" | grep -qv '^Z'; do
		[ $((tries -= 1)) -gt 0 ] || return
		sleep 0.05
	done
}

ip link set lo up
echo TAP version 13
echo "1..$((${#verbs[@]} + 23))"
for verb in "${verbs[@]}"; do
	measured 2 "$verb" --bw -n 100 -w 16 --warm 0.02 -m "${library[$verb]},preload"
	result $? "$verb bandwidth"
done
measured 2 write -n 40 --warm 0.02 -m optimistic,preload
result $? "write latency"
measured 1 send -n 40 --warm 0.02 -m optimistic
result $? "send latency"
measured 1 write_imm -n 40 --warm 0.02 -m leases
result $? "write_imm latency"
measured 1 cmp_swap -n 40 --warm 0.02 -m preload
result $? "cmp_swap latency"
measured 1 write --completion -n 40 -s 5000 -m optimistic
result $? "write from posting to completion"
measured 1 send -c uc -n 40 -s 5000 -m preload
result $? "send over UC"
measured 1 write -c uc --bw -n 60 -m pinned
result $? "write over UC"
measured 1 send -c ud -n 40 -s 1000 -m leases
result $? "send over UD"
measured 2 read --bw -t 3 -w 8 -n 60 -s 9000 --unaligned 13 -m optimistic,leases
result $? "threads, and messages that begin anywhere"
measured 2 write --bw -w 16 --signal 5 --inline 64 -n 100 -s 1,64 -m preload
result $? "few completions, inline data, several sizes"
absent_memory_comes_back
result $? "memory that was paged out"
unmapped_memory_comes_back
result $? "memory that was unmapped, at both ends"
reclaimed_memory_comes_back
result $? "memory that is reclaimed meanwhile, at both ends"
json_is_right
result $? "JSON and a histogram"
between_hosts 1 write -n 40 -m leases
result $? "write ping-pong between two processes by TCP"
between_hosts 2 send --bw -n 100 -w 8 -t 2 -m optimistic,preload
result $? "send between two processes by TCP"
strangers_are_turned_away
result $? "strangers are turned away"
refused mlx5_9 read -d mlx5_9
result $? "no device of this name"
refused 'is np_perf --listen 5002' read localhost -p 5002
result $? "nobody listens"
refused 'use --preload-library' read -m preload --preload-library /nonexistent
result $? "no preload library"
refused 'more than half' read --span 60G
result $? "more memory than there is"
leases_are_where_they_belong
result $? "leases are granted where they may be"
ended_runs_leave_nothing
result $? "a run that is ended leaves no process"
exit $failed
