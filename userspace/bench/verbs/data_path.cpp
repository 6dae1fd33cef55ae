// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * READ and WRITE without faults: latency of one at a time and bandwidth of many,
 * by plain verbs on pinned memory, through libnprdma on pinned memory, and
 * through libnprdma on unpinned memory that is all resident.
 */
#include "initiator.hpp"

#include <fmt/format.h>

#include <array>

namespace bench
{

namespace
{

constexpr std::size_t region_bytes = 32 * MiB;

struct way {
	const char *name;
	initiator *via;
	const mapping *mem;
	const ibv_mr *mr;
};

/*
 * Microseconds of one operation, one at a time: the median of batches, which are
 * long against the clock and short against what disturbs a busy machine.
 */
double latency(const way &w, ibv_wr_opcode opcode, std::uint32_t length, int batches, int batch,
	       bool used = false, std::uint32_t offset = 0)
{
	const std::size_t stride = (offset + length + 63) / 64 * 64;
	std::size_t at = 0;
	samples us;

	for (int i = 0; i < batches; i++) {
		const double begin = now_us();

		for (int j = 0; j < batch; j++, at = (at + stride) % region_bytes) {
			w.via->transfer(opcode, w.mem->address() + at + offset, w.mr->rkey, length);
			if (used)
				w.via->use(length);
		}
		us.add((now_us() - begin) / batch);
	}
	return us.median();
}

/* Megabytes per second with @window operations under way. */
double bandwidth(const way &w, ibv_wr_opcode opcode, std::uint32_t length, int count, int window)
{
	const double begin = now_us();

	for (int posted = 0, done = 0; done < count; done += w.via->poll())
		for (; posted < count && posted - done < window; posted++)
			w.via->post(
			    opcode,
			    w.mem->address() + static_cast<std::size_t>(posted) * length % region_bytes,
			    w.mr->rkey, static_cast<std::size_t>(posted) * length % w.via->buffer().bytes(),
			    length);
	return static_cast<double>(count) * length / (now_us() - begin);
}

struct experiment {
	const char *name;
	ibv_wr_opcode opcode;
	std::uint32_t length;
	int batches, batch, bandwidth_count, window;
	bool used = false; /* the application looks at what came */
};

constexpr std::array experiments = {
    experiment{"READ 4 KiB", IBV_WR_RDMA_READ, 4096, 60, 10, 2000, 32},
    experiment{"READ 4 KiB, used", IBV_WR_RDMA_READ, 4096, 60, 10, 0, 0, true},
    experiment{"WRITE 4 KiB", IBV_WR_RDMA_WRITE, 4096, 60, 10, 2000, 32},
    experiment{"READ 1 MiB", IBV_WR_RDMA_READ, 1 << 20, 16, 1, 48, 4},
    experiment{"WRITE 1 MiB", IBV_WR_RDMA_WRITE, 1 << 20, 16, 1, 48, 4},
};

/*
 * Where the time of one operation goes: into the call that posts it, into polls
 * that find nothing, and into the one that finds it.
 */
void measure_phases(const options &opt, const std::vector<way> &ways, report &out)
{
	constexpr std::uint32_t length = 4096;

	for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE})
		for (const way &w : ways) {
			samples post, wait, last;
			std::size_t at = 0;

			for (int i = 0; i < 200 * opt.rounds; i++, at = (at + length) % region_bytes) {
				const double begin = now_us();

				w.via->post(opcode, w.mem->address() + at, w.mr->rkey, 0, length);
				const double posted = now_us();
				double before;
				do
					before = now_us();
				while (!w.via->poll());
				const double end = now_us();

				post.add(posted - begin);
				wait.add(before - posted);
				last.add(end - before);
			}
			out.add("phases of 4 KiB",
				fmt::format("{} {}", opcode == IBV_WR_RDMA_READ ? "READ" : "WRITE", w.name),
				{{"post_us", post.median()},
				 {"wait_us", wait.median()},
				 {"last_poll_us", last.median()}});
		}
}

/*
 * What a READ without fault costs by its proof: a search for the signature in
 * what came, or a READ of the residency words after it. libnprdma changes from
 * the one to the other at npr_qp_attr.read_words_min.
 */
void measure_proofs(const options &opt, const rc::endpoint &responder, const mapping &mem, const ibv_mr *mr,
		    report &out)
{
	initiator scanning(opt.dev.initiator, responder, through::library_scanning, MiB);
	initiator by_words(opt.dev.initiator, responder, through::library_by_words, MiB);
	const std::array ways = {way{"scan", &scanning, &mem, mr}, way{"words", &by_words, &mem, mr}};

	for (const way &w : ways)
		for (std::size_t at = 0; at < region_bytes; at += MiB)
			w.via->transfer(IBV_WR_RDMA_READ, mem.address() + at, mr->rkey, MiB);
	for (std::uint32_t length = 4096; length <= MiB; length *= 4) {
		std::array<samples, ways.size()> us;
		samples ratio;

		for (int round = 0; round < opt.rounds; round++) {
			std::array<double, ways.size()> one{};

			for (std::size_t i = 0; i < ways.size(); i++)
				us[i].add(one[i] = latency(ways[i], IBV_WR_RDMA_READ, length, 20, 4));
			ratio.add(one[1] / one[0]);
		}
		out.add(
		    "READ by proof", fmt::format("{} KiB", length >> 10),
		    {{"scan_us", us[0].median()}, {"words_us", us[1].median()}, {"ratio", ratio.median()}});
	}
}

/*
 * What is done for the sake of premises: where an HCA does not promise that a READ is
 * executed after the WRITEs before it (P1), the words are read after the WRITE's own
 * completion; and a READ that begins inside of a unit is posted as two (P3).
 */
void measure_premises(const options &opt, const std::vector<way> &ways, const rc::endpoint &responder,
		      const mapping &mem, const ibv_mr *mr, report &out)
{
	constexpr std::uint32_t length = 4096, offset = 8;
	constexpr int batches = 60, batch = 10, count = 2000, window = 32;
	std::array<std::optional<initiator>, 2> writers;
	std::array<samples, 2> us, rates;
	samples slower, rate_ratio;

	for (std::size_t i = 0; i < writers.size(); i++) {
		const kernel_parameter answer("/sys/module/ib_core/parameters/nprdma_read_order",
					      i ? "out-of-order" : "in-order");

		/* A queue pair learns it with the keys. */
		writers[i].emplace(opt.dev.initiator, responder, through::library, 8 * MiB);
		for (std::size_t at = 0; at < region_bytes; at += MiB)
			writers[i]->transfer(IBV_WR_RDMA_WRITE, mem.address() + at, mr->rkey, MiB);
	}
	for (int round = 0; round < opt.rounds; round++) {
		std::array<double, 2> one{}, rate{};

		for (std::size_t i = 0; i < writers.size(); i++) {
			const way w{"", &*writers[i], &mem, mr};

			us[i].add(one[i] = latency(w, IBV_WR_RDMA_WRITE, length, batches, batch));
			rates[i].add(rate[i] = bandwidth(w, IBV_WR_RDMA_WRITE, length, count, window));
		}
		slower.add(one[1] / one[0]);
		rate_ratio.add(rate[1] / rate[0]);
	}
	out.add("WRITE of 4 KiB by read order", "latency",
		{{"in_order_us", us[0].median()}, {"else_us", us[1].median()}, {"ratio", slower.median()}});
	out.add("WRITE of 4 KiB by read order", "bandwidth",
		{{"in_order_MBps", rates[0].median()},
		 {"else_MBps", rates[1].median()},
		 {"ratio", rate_ratio.median()}});

	for (const way &w : ways) {
		samples begins_at_unit, inside, split_ratio;

		for (int round = 0; round < opt.rounds; round++) {
			const double whole =
			    latency(w, IBV_WR_RDMA_READ, length - offset, batches, batch, false, 0);
			const double split =
			    latency(w, IBV_WR_RDMA_READ, length - offset, batches, batch, false, offset);

			begins_at_unit.add(whole);
			inside.add(split);
			split_ratio.add(split / whole);
		}
		out.add("READ of 4088 bytes that begins 8 bytes inside of a unit", w.name,
			{{"at_unit_us", begins_at_unit.median()},
			 {"inside_us", inside.median()},
			 {"ratio", split_ratio.median()}});
	}
}

} // namespace

void measure_data_path(const options &opt, report &out)
{
	const rc::endpoint responder(opt.dev.responder, 16);
	const mapping pinned_mem(region_bytes, mapping::pages::small);
	const mapping unpinned_mem(region_bytes, mapping::pages::small);
	const auto pinned = responder.register_memory(pinned_mem.addr(), region_bytes, remote_access);
	const auto unpinned = opt.unpinned ? responder.register_memory(unpinned_mem.addr(), region_bytes,
								       remote_access | IBV_ACCESS_UNPINNED)
					   : nullptr;
	initiator verbs(opt.dev.initiator, responder, through::verbs, 8 * MiB);
	std::optional<initiator> library, relaxed;
	std::vector<way> ways = {{"verbs_pinned", &verbs, &pinned_mem, pinned.get()}};

	if (opt.unpinned) {
		library.emplace(opt.dev.initiator, responder, through::library, 8 * MiB);
		relaxed.emplace(opt.dev.initiator, responder, through::library_relaxed, 8 * MiB);
		ways.push_back({"library_pinned", &*library, &pinned_mem, pinned.get()});
		ways.push_back({"unpinned", &*library, &unpinned_mem, unpinned.get()});
		ways.push_back({"unpinned_relaxed", &*relaxed, &unpinned_mem, unpinned.get()});
		/* Faults first: all pages in both windows, and their words known. */
		for (const way &w : ways)
			for (const ibv_wr_opcode opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ})
				for (std::size_t at = 0; at < region_bytes; at += MiB)
					w.via->transfer(opcode, w.mem->address() + at, w.mr->rkey, MiB);
	}

	const auto faults = [&] {
		return library ? library->library().stats().faults + relaxed->library().stats().faults : 0;
	};
	const std::uint64_t faults_before = faults();
	std::vector<std::pair<const char *, row>> bandwidths;

	for (const experiment &e : experiments) {
		std::vector<samples> us(ways.size()), rates(ways.size()), overhead(ways.size());

		for (int round = 0; round < opt.rounds; round++) {
			double base = 0;

			for (std::size_t i = 0; i < ways.size(); i++) {
				const double one =
				    latency(ways[i], e.opcode, e.length, e.batches, e.batch, e.used);

				base = i ? base : one;
				us[i].add(one);
				overhead[i].add(one / base);
			}
			for (std::size_t i = 0; e.window && i < ways.size(); i++)
				rates[i].add(
				    bandwidth(ways[i], e.opcode, e.length, e.bandwidth_count, e.window));
		}
		row latencies, rate;

		for (std::size_t i = 0; i < ways.size(); i++) {
			latencies.emplace_back(fmt::format("{}_us", ways[i].name), us[i].median());
			if (e.window)
				rate.emplace_back(fmt::format("{}_MBps", ways[i].name), rates[i].median());
		}
		for (std::size_t i = 1; i < ways.size(); i++)
			latencies.emplace_back(fmt::format("{}_ratio", ways[i].name), overhead[i].median());
		out.add("latency", e.name, latencies);
		if (e.window)
			bandwidths.emplace_back(e.name, rate);

		if (e.length == 4096 && !e.used)
			out.expect({fmt::format("{} without fault: unpinned / pinned by plain verbs", e.name),
				    opt.unpinned ? overhead[2].median() : 0, 1.1, false, opt.unpinned});
	}
	measure_phases(opt, ways, out);
	if (opt.unpinned) {
		measure_proofs(opt, responder, unpinned_mem, unpinned.get(), out);
		measure_premises(opt, ways, responder, unpinned_mem, unpinned.get(), out);
	}
	for (const auto &[name, rate] : bandwidths)
		out.add("bandwidth", name, rate);
	if (opt.unpinned)
		out.add("bandwidth", "faults meanwhile",
			{{"faults", static_cast<double>(faults() - faults_before)}});
}

} // namespace bench
