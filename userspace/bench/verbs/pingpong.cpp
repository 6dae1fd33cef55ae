// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The round trip that faults are measured against: two processes that send each
 * other 4 KiB and sleep until a completion event, as ibv_rc_pingpong -e does,
 * and that program itself.
 */
#include "bench.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace bench
{

namespace
{

constexpr std::uint32_t message_bytes = 4096;
constexpr std::uint32_t receives = 64;

} // namespace

struct pingpong::side {
	rc::endpoint end;
	mapping buffer;
	rc::handle<ibv_mr> mr;
	std::vector<rc::handle<ibv_qp>> qps;
	int unacknowledged = 0;

	explicit side(const std::string &device)
	    : end(device, 2 * receives),
	      buffer(message_bytes, mapping::pages::small),
	      mr(end.register_memory(buffer.addr(), buffer.bytes(), IBV_ACCESS_LOCAL_WRITE))
	{
		qps.push_back(end.create_qp(receives, receives));
	}

	~side() { ibv_ack_cq_events(end.cq.get(), static_cast<unsigned int>(unacknowledged)); }

	/* Both have posted their receives before anybody sends. */
	void meet(int socket)
	{
		char ready = 1;

		rc::connect_all(socket, qps);
		arm();
		for (std::uint32_t i = 0; i < receives; i++)
			post_receive();
		rc::send_all(socket, &ready, 1);
		rc::receive_all(socket, &ready, 1);
	}

	void arm()
	{
		if (const int error = ibv_req_notify_cq(end.cq.get(), 0))
			rc::fail(error, "ibv_req_notify_cq");
	}

	void post_receive()
	{
		ibv_sge sge = {.addr = buffer.address(), .length = message_bytes, .lkey = mr->lkey};
		ibv_recv_wr wr{}, *bad = nullptr;

		wr.sg_list = &sge;
		wr.num_sge = 1;
		if (const int error = ibv_post_recv(qps[0].get(), &wr, &bad))
			rc::fail(error, "ibv_post_recv");
	}

	void post_send()
	{
		ibv_sge sge = {.addr = buffer.address(), .length = message_bytes, .lkey = mr->lkey};
		ibv_send_wr wr{}, *bad = nullptr;

		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		if (const int error = ibv_post_send(qps[0].get(), &wr, &bad))
			rc::fail(error, "ibv_post_send");
	}

	/* Sleeps for an event, then takes what is there. Returns the messages received. */
	int sleep_and_poll()
	{
		ibv_cq *cq;
		void *unused;
		ibv_wc wc[2];
		int received = 0;

		if (ibv_get_cq_event(end.channel.get(), &cq, &unused))
			rc::fail(errno, "ibv_get_cq_event");
		unacknowledged++;
		arm();
		while (const int n = ibv_poll_cq(end.cq.get(), 2, wc)) {
			for (int i = 0; i < n; i++) {
				if (wc[i].status != IBV_WC_SUCCESS)
					throw std::runtime_error(ibv_wc_status_str(wc[i].status));
				if (wc[i].opcode == IBV_WC_RECV) {
					post_receive();
					received++;
				}
			}
		}
		return received;
	}
};

pingpong::pingpong(const std::string &here, const std::string &there)
{
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		rc::fail(errno, "socketpair");
	child_ = fork();
	if (child_ < 0)
		rc::fail(errno, "fork");
	if (!child_) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		fcntl(ends[1], F_SETFD, 0);
		execl("/proc/self/exe", "nprdma-bench", "--serve-pingpong", std::to_string(ends[1]).c_str(),
		      "--responder", there.c_str(), nullptr);
		_exit(127);
	}
	close(ends[1]);
	side_ = std::make_unique<side>(here);
	side_->meet(ends[0]);
	close(ends[0]);
}

pingpong::~pingpong()
{
	kill(child_, SIGKILL);
	waitpid(child_, nullptr, 0);
}

double pingpong::round(int iterations)
{
	const double begin = now_us();

	for (int i = 0; i < iterations; i++) {
		side_->post_send();
		while (!side_->sleep_and_poll())
			;
	}
	return (now_us() - begin) / iterations;
}

void pingpong::serve(const std::string &device, int socket)
{
	side mine(device);

	mine.meet(socket);
	for (;;)
		for (int n = mine.sleep_and_poll(); n; n--)
			mine.post_send();
}

std::optional<double> rc_pingpong(const std::string &server, const std::string &client)
{
	/* The client tries again by itself until the server listens. */
	const std::string command = "ibv_rc_pingpong -e -d " + server +
				    " >/dev/null & for i in 1 2 3 4 5; do ibv_rc_pingpong -e -d " + client +
				    " localhost 2>/dev/null && break; sleep 1; done; wait";
	std::FILE *pipe = popen(command.c_str(), "r");
	std::optional<double> us;
	char line[256];

	if (!pipe)
		return std::nullopt;
	while (std::fgets(line, sizeof(line), pipe)) {
		double seconds, per_iteration;
		int iterations;

		if (std::sscanf(line, "%d iters in %lf seconds = %lf usec/iter", &iterations, &seconds,
				&per_iteration) == 3)
			us = per_iteration;
	}
	pclose(pipe);
	return us;
}

} // namespace bench
