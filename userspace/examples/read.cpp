/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The same in C++: the library's objects end by themselves, before the verbs objects that they use. */
#include "ends.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <nprdma/nprdma.hpp>

static int run(const end &owner, const end &peer)
{
	constexpr std::size_t size = 1 << 20;
	std::array<char, 4096> buffer{};
	char *const memory = map_memory(size, 'x');
	const nprdma::region remote(*owner.pd, std::as_writable_bytes(std::span(memory, size)),
				    IBV_ACCESS_REMOTE_READ);
	/* A buffer of an unpinned region is in memory while a request uses it. */
	const nprdma::region local(*peer.pd, std::as_writable_bytes(std::span(buffer)),
				   IBV_ACCESS_LOCAL_WRITE);
	nprdma::context context(*peer.verbs);
	nprdma::cq cq = context.attach(*peer.cq);
	nprdma::qp qp = cq.attach(*peer.qp);

	ibv_sge sge{reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.size(), local.get()->lkey};
	ibv_send_wr wr{}, *bad;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_RDMA_READ;
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.wr.rdma.remote_addr = reinterpret_cast<std::uintptr_t>(memory);
	wr.wr.rdma.rkey = remote.rkey();
	check(qp.post_send(wr, bad), "post_send");

	ibv_wc wc;
	int n;
	while ((n = cq.poll({&wc, 1})) == 0)
		;
	check(n < 0 ? n : 0, "poll");
	const npr_stats stats = qp.stats();
	std::printf("READ: %s; the first byte is '%c'; asked for pages %llu times\n",
		    ibv_wc_status_str(wc.status), buffer[0], static_cast<unsigned long long>(stats.faults));
	return wc.status != IBV_WC_SUCCESS || std::memcmp(buffer.data(), memory, buffer.size()) != 0;
}

int main(int argc, char **argv)
try {
	end owner, peer;
	open_ends(argc, argv, &owner, &peer);
	const int result = run(owner, peer);
	close_end(&peer);
	close_end(&owner);
	return result;
} catch (const std::exception &e) {
	std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
	return 1;
}
