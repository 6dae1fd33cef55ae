# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# For scripts that run programs of others in a guest, as server and client between two
# HCAs, and print TAP.

temp=$(mktemp -d)
count=0
failed=0
port=18500
server=()
client=()
with=() # variables that they have, for env

# listening PID: the server is there when the kernel lists its socket so.
listening() {
	awk -v p="$(printf ':%04X' "$port")" '$2 ~ p "$" && $4 == "0A" { found = 1 } END { exit !found }' \
		/proc/net/tcp /proc/net/tcp6
}

wait_for_listener() {
	local pid=$1 end=$((SECONDS + 20))

	while [ "$SECONDS" -lt "$end" ] && kill -0 "$pid" 2>/dev/null; do
		if listening "$pid"; then
			return 0
		fi
		sleep 0.05
	done
	return 1
}

# both: the commands in the arrays server and client; the client goes when the server listens.
both() {
	local pid result=0

	timeout -k 5 120 env "${with[@]}" "${server[@]}" >"$temp/server" 2>&1 &
	pid=$!
	if wait_for_listener "$pid"; then
		timeout -k 5 120 env "${with[@]}" "${client[@]}" >"$temp/client" 2>&1 || result=$?
		# A server whose client failed may wait for ever.
		[ "$result" -eq 0 ] || kill "$pid" 2>/dev/null
	else
		echo "the server did not listen" >"$temp/client"
		result=1
		kill "$pid" 2>/dev/null
	fi
	wait "$pid" || result=$?
	return "$result"
}

# check_both NAME: both have to succeed. When all is done perftest compares the CPU's
# counter with the clock, and fails if a busy host has made them differ: that says nothing
# of what was done, and it is done again.
check_both() {
	local result=0
	count=$((count + 1))
	while
		both
		result=$?
		[ "$result" -ne 0 ] &&
			grep -qs '^ *Correlation coefficient' "$temp/server" "$temp/client"
	do
		:
	done
	if [ "$result" -eq 0 ]; then
		echo "ok $count $1"
		return
	fi
	failed=$((failed + 1))
	echo "not ok $count $1"
	echo "# status $result: ${server[*]}; ${client[*]}"
	sed 's/^/# server: /' "$temp/server" | tail -n 15
	sed 's/^/# client: /' "$temp/client" | tail -n 15
}

# expect NAME COMMAND...
expect() {
	count=$((count + 1))
	if "${@:2}"; then
		echo "ok $count $1"
	else
		failed=$((failed + 1))
		echo "not ok $count $1"
		tail -n 40 "$temp/devinfo" | sed 's/^/# /'
	fi
}
