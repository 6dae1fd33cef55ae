// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * What leases have to hold up beside pinned memory: many threads, and more memory in use
 * than may be leased.
 */
#include "initiator.hpp"

#include <fmt/format.h>

#include <array>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <unistd.h>

namespace bench
{

namespace
{

/* A thread's own queue pair, whose device, context and library all threads share. */
class worker
{
public:
	static constexpr std::uint32_t bytes = 64, window = 32;

	/* @library: null: plain verbs. Both buffers are 1 MiB, unpinned with the library. */
	worker(const rc::endpoint &here, const rc::endpoint &responder, nprdma::context *library)
	    : local_(MiB, mapping::pages::small),
	      remote_(MiB, mapping::pages::small),
	      cq_(rc::own(ibv_create_cq(here.context.get(), 2 * window, nullptr, nullptr, 0),
			  "ibv_create_cq")),
	      remote_mr_(responder.register_memory(remote_.addr(), MiB,
						   remote_access | (library ? IBV_ACCESS_UNPINNED : 0))),
	      other_(responder.create_qp(1))
	{
		ibv_qp_init_attr init{};

		init.send_cq = init.recv_cq = cq_.get();
		init.qp_type = IBV_QPT_RC;
		/* The library may use twice as many entries as there are requests. */
		init.cap = {.max_send_wr = 2 * window,
			    .max_recv_wr = 1,
			    .max_send_sge = 1,
			    .max_recv_sge = 1,
			    .max_inline_data = 64};
		qp_ = rc::own(ibv_create_qp(here.pd.get(), &init), "ibv_create_qp");
		rc::connect_pair(*qp_, *other_);
		if (library) {
			unpinned_.emplace(*here.pd, std::span(static_cast<std::byte *>(local_.addr()), MiB),
					  IBV_ACCESS_LOCAL_WRITE);
			library_cq_.emplace(library->attach(*cq_));
			library_qp_.emplace(library_cq_->attach(*qp_));
		} else {
			pinned_ = here.register_memory(local_.addr(), MiB, IBV_ACCESS_LOCAL_WRITE);
		}
	}

	/* All of the peer's buffer, so that it is there, and may be leased as a whole. */
	void bring()
	{
		post(0, MiB);
		while (!poll())
			;
	}

	/* WRITEs, each signaled, until @end: how many complete from @begin on. */
	int run(double begin, double end)
	{
		int posted = 0, done = 0, before = 0;

		for (double now = now_us(); now < end; now = now_us()) {
			for (; posted - done < static_cast<int>(window); posted++)
				post(static_cast<std::size_t>(posted) * bytes % MiB, bytes);
			done += poll();
			before = now < begin ? done : before;
		}
		for (; done < posted; done += poll())
			;
		return done - before;
	}

private:
	void post(std::size_t at, std::uint32_t length)
	{
		ibv_sge sge = {.addr = local_.address() + at,
			       .length = length,
			       .lkey = unpinned_ ? unpinned_->get()->lkey : pinned_->lkey};
		ibv_send_wr wr{}, *bad = nullptr;

		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = remote_.address() + at;
		wr.wr.rdma.rkey = remote_mr_->rkey;
		if (const int error =
			library_qp_ ? -library_qp_->post_send(wr, bad) : ibv_post_send(qp_.get(), &wr, &bad))
			rc::fail(error, "post");
	}

	int poll()
	{
		ibv_wc wc[16];
		const int n = library_cq_ ? library_cq_->poll(wc) : ibv_poll_cq(cq_.get(), 16, wc);

		if (n < 0)
			rc::fail(library_cq_ ? -n : EIO, "poll");
		for (int i = 0; i < n; i++)
			if (wc[i].status != IBV_WC_SUCCESS)
				throw std::runtime_error(std::string("WRITE failed: ") +
							 ibv_wc_status_str(wc[i].status));
		return n;
	}

	mapping local_, remote_;
	rc::handle<ibv_cq> cq_;
	rc::handle<ibv_mr> pinned_, remote_mr_;
	std::optional<nprdma::region> unpinned_;
	rc::handle<ibv_qp> other_, qp_;
	std::optional<nprdma::cq> library_cq_;
	std::optional<nprdma::qp> library_qp_;
};

using workers = std::vector<std::unique_ptr<worker>>;

/* Requests per second of the first @threads of @all together, when all have what leases they get. */
double rate(const workers &all, std::size_t threads)
{
	constexpr double warm_us = 250e3, measured_us = 250e3;
	std::vector<std::exception_ptr> errors(threads);
	std::vector<std::thread> running;
	std::vector<int> done(threads);
	const double begin = now_us() + warm_us, end = begin + measured_us;

	for (std::size_t i = 0; i < threads; i++)
		running.emplace_back([&, i] {
			try {
				done[i] = all[i]->run(begin, end);
			} catch (...) {
				errors[i] = std::current_exception();
			}
		});
	for (std::thread &t : running)
		t.join();
	for (const std::exception_ptr &error : errors)
		if (error)
			std::rethrow_exception(error);
	return std::accumulate(done.begin(), done.end(), 0.0) * 1e6 / measured_us;
}

void measure_threads(const options &opt, report &out)
{
	constexpr std::array<std::size_t, 4> threads = {1, 2, 4, 8};
	const rc::endpoint responder(opt.dev.responder, 16), here(opt.dev.initiator, 16);
	nprdma::context library(*here.context);
	std::array<workers, 2> ways;
	std::array<std::array<samples, threads.size()>, 2> rates;
	std::array<samples, threads.size()> curves;

	for (std::size_t i = 0; i < threads.back(); i++) {
		ways[0].push_back(std::make_unique<worker>(here, responder, nullptr));
		ways[1].push_back(std::make_unique<worker>(here, responder, &library));
	}
	for (const workers &w : ways)
		for (const auto &one : w)
			one->bring();
	for (int round = 0; round < opt.rounds; round++) {
		std::array<std::array<double, threads.size()>, 2> one{};

		for (std::size_t n = 0; n < threads.size(); n++)
			for (std::size_t i = 0; i < ways.size(); i++)
				rates[i][n].add(one[i][n] = rate(ways[i], threads[n]));
		for (std::size_t n = 0; n < threads.size(); n++)
			curves[n].add(one[1][n] / one[1][0] / (one[0][n] / one[0][0]));
	}
	for (std::size_t n = 0; n < threads.size(); n++)
		out.add("WRITEs of 64 bytes by threads with a queue pair each, 1000/s",
			fmt::format("{} threads", threads[n]),
			{{"pinned", rates[0][n].median() / 1e3},
			 {"unpinned", rates[1][n].median() / 1e3},
			 {"curve_ratio", curves[n].median()}});
	out.expect({"8 threads / 1 thread: unpinned / pinned", curves.back().median(), 0.85, true});
}

/*
 * READs of pages at random, of four times as much memory as may be leased, beside the same without
 * leases. The buffer that they land in is pinned: without leases one that is not costs two system
 * calls each time, and any lease would look good.
 */
void measure_working_set(const options &opt, report &out)
{
	constexpr const char *percent = "/sys/module/ib_core/parameters/nprdma_lease_percent";
	constexpr std::uint32_t length = 4096;
	/* As many to begin with: a part whose lease was refused is left alone for a second. */
	constexpr int count = 40'000, window = 16;
	const std::size_t bytes =
	    4 * static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) / 100 * page_size / MiB * MiB;
	const rc::endpoint responder(opt.dev.responder, 16);
	const mapping mem(bytes, mapping::pages::small);
	std::array<samples, 2> rates;
	samples ratio;
	std::uint64_t leases = 0, recalls = 0;

	for (int round = 0; round < opt.rounds; round++) {
		std::array<double, 2> one{};

		for (const std::size_t turn : {0, 1}) {
			const std::size_t leased = (turn + static_cast<std::size_t>(round)) % 2;
			const kernel_parameter share(percent, leased ? "1" : "0");
			const auto mr =
			    responder.register_memory(mem.addr(), bytes, remote_access | IBV_ACCESS_UNPINNED);
			initiator reader(opt.dev.initiator, responder, through::library, window * length);
			std::mt19937_64 random(static_cast<std::uint64_t>(round));
			const auto read = [&](int n) {
				for (int posted = 0, done = 0; done < n; done += reader.poll())
					for (; posted < n && posted - done < window; posted++)
						reader.post(
						    IBV_WR_RDMA_READ,
						    mem.address() + random() % (bytes / length) * length,
						    mr->rkey, posted % window * std::size_t{length}, length);
			};

			/* Faults first, and the leases that there are. */
			for (std::size_t at = 0; at < bytes; at += length * window)
				reader.transfer(IBV_WR_RDMA_READ, mem.address() + at, mr->rkey,
						length * window);
			read(count);
			const double begin = now_us();
			read(count);
			one[leased] = count * 1e6 / (now_us() - begin);
			rates[leased].add(one[leased]);
			leases += leased ? reader.library().stats().leases : 0;
			recalls += leased ? reader.library().stats().recalls : 0;
		}
		ratio.add(one[1] / one[0]);
	}
	out.add("READs of 4 KiB at random, of four times what may be leased",
		fmt::format("{} MiB", bytes / MiB),
		{{"without_per_s", rates[0].median()},
		 {"with_per_s", rates[1].median()},
		 {"ratio", ratio.median()},
		 {"leases", static_cast<double>(leases)},
		 {"recalls", static_cast<double>(recalls)}});
	out.expect(
	    {"READs of four times what may be leased: with / without leases", ratio.median(), 0.9, true});
}

} // namespace

void measure_leases(const options &opt, report &out)
{
	if (!opt.unpinned)
		return;
	measure_threads(opt, out);
	measure_working_set(opt, out);
}

} // namespace bench
