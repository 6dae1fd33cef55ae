// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * How long ibv_reg_mr() and ibv_dereg_mr() take, against the size of the region
 * and the state of its memory, pinned and unpinned in turns.
 */
#include "../../tools/demo/guest.hpp"
#include "bench.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace bench
{

namespace
{

enum kind : std::size_t { pinned, unpinned, kinds };

struct times {
	samples reg[kinds], dereg[kinds];
};

constexpr const char *to_string(mapping::pages state)
{
	switch (state) {
	case mapping::pages::untouched:
		return "untouched";
	case mapping::pages::small:
		return "4 KiB pages";
	case mapping::pages::huge:
		return "huge pages";
	}
	return "?";
}

std::string size_name(std::uint64_t bytes)
{
	return bytes < GiB ? fmt::format("{} MiB", bytes / MiB) : fmt::format("{} GiB", bytes / GiB);
}

void once(const rc::endpoint &end, const mapping &mem, kind what, times &to)
{
	const int access = remote_access | (what == unpinned ? IBV_ACCESS_UNPINNED : 0);
	const double t0 = now_us();
	auto mr = end.register_memory(mem.addr(), mem.bytes(), access);
	const double t1 = now_us();

	mr.reset();
	to.reg[what].add(t1 - t0);
	to.dereg[what].add(now_us() - t1);
}

/* Huge pages are a promise of nobody: a figure for them needs them to be there. */
void check_huge(const mapping &mem)
{
	const std::uint64_t kib = guest::number_of("/proc/self/smaps_rollup", "AnonHugePages");

	if (kib < mem.bytes() / 1024 * 9 / 10)
		throw std::runtime_error(
		    fmt::format("only {} of {} KiB are huge pages", kib, mem.bytes() / 1024));
}

times measure(const rc::endpoint &end, std::uint64_t bytes, mapping::pages state, bool with_pinned,
	      bool with_unpinned, int rounds)
{
	std::optional<mapping> touched;
	times result;

	if (state != mapping::pages::untouched)
		touched.emplace(bytes, state);
	if (state == mapping::pages::huge)
		check_huge(*touched);
	for (int i = 0; i < rounds; i++) {
		for (const kind what : {pinned, unpinned}) {
			if (!(what == pinned ? with_pinned : with_unpinned))
				continue;
			/* Pinning touches memory, so that each time needs new memory. */
			if (touched)
				once(end, *touched, what, result);
			else
				once(end, mapping(bytes, state), what, result);
		}
	}
	return result;
}

} // namespace

void measure_registration(const options &opt, report &out)
{
	const rc::endpoint end(opt.dev.responder, 16);
	const std::uint64_t fits = (guest::number_of("/proc/meminfo", "MemAvailable") << 10) * 7 / 10;
	std::map<mapping::pages, double> ratio_at_1g;
	std::map<std::uint64_t, double> untouched_unpinned;

	for (const mapping::pages state :
	     {mapping::pages::untouched, mapping::pages::small, mapping::pages::huge}) {
		for (std::uint64_t bytes = 64 * MiB; bytes <= 256 * GiB; bytes *= 2) {
			const bool in_memory = bytes <= fits;
			const bool untouched = state == mapping::pages::untouched;
			row values;

			if (!in_memory && (!untouched || !opt.unpinned))
				break;
			/* Pinning untouched memory takes seconds; it does not scatter much. */
			const int rounds =
			    untouched && in_memory && bytes >= 512 * MiB ? 3 : std::min(opt.rounds, 9);
			const times t = measure(end, bytes, state, in_memory, opt.unpinned, rounds);
			const double p = t.reg[pinned].median(), u = t.reg[unpinned].median();

			if (in_memory) {
				values.emplace_back("pinned_us", p);
				values.emplace_back("pinned_dereg_us", t.dereg[pinned].median());
			}
			if (opt.unpinned) {
				values.emplace_back("unpinned_us", u);
				values.emplace_back("unpinned_dereg_us", t.dereg[unpinned].median());
				if (untouched)
					untouched_unpinned[bytes] = u;
			}
			if (in_memory && opt.unpinned) {
				values.emplace_back("ratio", p / u);
				if (bytes == GiB)
					ratio_at_1g[state] = p / u;
			}
			out.add("registration", fmt::format("{}, {}", size_name(bytes), to_string(state)),
				values);
		}
	}

	const auto ratio = [&](mapping::pages state, double limit) {
		const auto found = ratio_at_1g.find(state);

		out.expect({fmt::format("registration of 1 GiB, {}: pinned / unpinned", to_string(state)),
			    found == ratio_at_1g.end() ? 0 : found->second, limit, true,
			    found != ratio_at_1g.end()});
	};
	ratio(mapping::pages::untouched, 100);
	ratio(mapping::pages::small, 5);
	ratio(mapping::pages::huge, 1);
	const bool both = untouched_unpinned.contains(GiB) && untouched_unpinned.contains(256 * GiB);
	out.expect({"registration, unpinned: 256 GiB / 1 GiB",
		    both ? untouched_unpinned[256 * GiB] / untouched_unpinned[GiB] : 0, 64, false, both});
}

} // namespace bench
