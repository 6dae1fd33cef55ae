/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is explored: who does what on how many pages, and how often memory
 * management, or the network, may come between. These are the bounds of the proof.
 */
#include "lease.hpp"
#include "model.hpp"

namespace model
{

const std::vector<scenario> &scenarios()
{
	constexpr u8 all = none;
	constexpr work_request write{true, 0, 1, all, false, false}, read{false, 0, 1, all, false, false};
	constexpr work_request write_2{true, 0, 2, all, false, false}, read_2{false, 0, 2, all, false, false};
	constexpr work_request large_read{false, 0, 1, all, true, false}, once{true, 0, 1, all, false, true};
	constexpr work_request once_unit_0{true, 0, 1, 0, false, true};
	constexpr work_request read_1{false, 1, 1, all, false, false};
	constexpr work_request write_1{true, 1, 1, all, false, false};
	constexpr work_request write_unit_0{true, 0, 1, 0, false, false},
	    write_unit_1{true, 0, 1, 1, false, false};

	static const std::vector<scenario> list = {
	    {.name = "write", .peers = {{write}}, .budget = 3, .prefetches = 1, .resident = 1, .knows = true},
	    {.name = "write-absent", .peers = {{write}}, .budget = 2, .prefetches = 1, .present = 1},
	    {.name = "write-two-pages", .pages = 2, .peers = {{write_2}}, .budget = 2, .resident = 1},
	    {.name = "write-write", .peers = {{write, write}}, .budget = 2, .prefetches = 1, .present = 1},
	    {.name = "write-read", .peers = {{write, read}}, .budget = 2, .resident = 1, .knows = true},
	    {.name = "two-writers",
	     .units = 2,
	     .peers = {{write_unit_0}, {write_unit_1}},
	     .budget = 1,
	     .present = 1},
	    {.name = "writer-and-reader", .peers = {{write}, {read}}, .budget = 1, .present = 1},
	    {.name = "read", .units = 2, .peers = {{read}}, .budget = 3, .prefetches = 1, .resident = 1},
	    {.name = "read-two-pages", .pages = 2, .peers = {{read_2}}, .budget = 2, .resident = 3},
	    {.name = "large-read",
	     .units = 2,
	     .peers = {{large_read, large_read}},
	     .budget = 2,
	     .prefetches = 1,
	     .resident = 1},
	    {.name = "read-own-signature",
	     .peers = {{read}},
	     .budget = 2,
	     .prefetches = 1,
	     .resident = 1,
	     .user_signature = true},
	    {.name = "large-read-own-signature",
	     .peers = {{large_read}},
	     .budget = 2,
	     .prefetches = 1,
	     .resident = 1,
	     .knows = true,
	     .user_signature = true},
	    {.name = "file", .peers = {{write, read}}, .events = page_out | clean, .budget = 2, .present = 1},
	    {.name = "move", .peers = {{write}}, .events = move, .budget = 2, .prefetches = 1, .resident = 1},
	    {.name = "hold",
	     .peers = {{write}},
	     .events = page_out | clean | move,
	     .budget = 3,
	     .present = 1,
	     .hold_first = true},
	    {.name = "two-holds",
	     .peers = {{write}, {read}},
	     .events = page_out | clean,
	     .budget = 1,
	     .present = 1,
	     .hold_first = true},
	    {.name = "exactly-once",
	     .peers = {{once}},
	     .events = page_out | clean | move,
	     .budget = 3,
	     .present = 1},
	    {.name = "discard",
	     .peers = {{write}},
	     .events = discard,
	     .budget = 2,
	     .prefetches = 1,
	     .resident = 1},
	    {.name = "discard-held",
	     .units = 2,
	     .peers = {{once_unit_0}, {write_unit_1}},
	     .events = discard,
	     .budget = 1,
	     .present = 1},
	    {.name = "large-read-clean",
	     .units = 2,
	     .peers = {{large_read, large_read}},
	     .events = page_out | clean,
	     .budget = 2,
	     .resident = 1},
	    {.name = "held-and-cleaned",
	     .peers = {{read}, {write}},
	     .events = clean,
	     .budget = 1,
	     .resident = 1,
	     .knows = true,
	     .user_signature = true,
	     .hold_first = true},
	    {.name = "fork",
	     .peers = {{write, read}},
	     .events = fork,
	     .budget = 2,
	     .prefetches = 1,
	     .resident = 1,
	     .knows = true},
	    {.name = "fork-page-out",
	     .peers = {{write}},
	     .events = fork | page_out,
	     .budget = 2,
	     .present = 1},
	    {.name = "fork-held", .peers = {{once}, {read}}, .events = fork, .budget = 1, .present = 1},
	    {.name = "huge",
	     .pages = 2,
	     .peers = {{write, write_1}},
	     .events = page_out | clean,
	     .budget = 2,
	     .present = 3,
	     .entry = true},
	    {.name = "huge-writer-and-reader",
	     .pages = 2,
	     .peers = {{write_1}, {read}},
	     .budget = 1,
	     .resident = 3,
	     .entry = true,
	     .knows = true},
	    {.name = "huge-held",
	     .pages = 2,
	     .peers = {{once}, {read_1}},
	     .events = page_out | clean,
	     .budget = 1,
	     .present = 3,
	     .entry = true},
	    {.name = "huge-held-for-read",
	     .pages = 2,
	     .peers = {{read}},
	     .events = page_out | clean,
	     .budget = 1,
	     .prefetches = 1,
	     .present = 3,
	     .entry = true,
	     .hold_first = true},
	    {.name = "huge-fork",
	     .pages = 2,
	     .peers = {{write_2}},
	     .events = fork,
	     .budget = 1,
	     .resident = 3,
	     .entry = true},
	    {.name = "collapse",
	     .pages = 2,
	     .peers = {{write}, {read_1}},
	     .events = page_out | collapse,
	     .budget = 1,
	     .resident = 3},
	    {.name = "write-overtaken",
	     .peers = {{write}},
	     .budget = 3,
	     .prefetches = 1,
	     .resident = 1,
	     .knows = true,
	     .overtakes = true},
	    {.name = "write-two-pages-overtaken",
	     .pages = 2,
	     .peers = {{write_2}},
	     .budget = 1,
	     .resident = 1,
	     .overtakes = true},
	    {.name = "write-read-overtaken",
	     .peers = {{write, read}},
	     .budget = 2,
	     .resident = 1,
	     .knows = true,
	     .overtakes = true},
	    {.name = "large-read-overtaken",
	     .units = 2,
	     .peers = {{large_read, large_read}},
	     .budget = 2,
	     .resident = 1,
	     .overtakes = true},
	    {.name = "exactly-once-overtaken",
	     .peers = {{once}},
	     .events = page_out | clean | move,
	     .budget = 2,
	     .present = 1,
	     .overtakes = true},
	    {.name = "fork-overtaken",
	     .peers = {{write}},
	     .events = fork | page_out,
	     .budget = 2,
	     .resident = 1,
	     .knows = true,
	     .overtakes = true},
	    {.name = "reclaim",
	     .pages = 2,
	     .peers = {{write}},
	     .budget = 2,
	     .prefetches = 1,
	     .present = 3,
	     .reclaims = true},
	};
	return list;
}

const scenario *find_scenario(std::string_view name)
{
	for (const scenario &sc : scenarios())
		if (sc.name == name)
			return &sc;
	return nullptr;
}

scenario deeper(scenario sc, unsigned more)
{
	sc.budget = static_cast<u8>(sc.budget + more);
	if (sc.prefetches)
		sc.prefetches = static_cast<u8>(sc.prefetches + more);
	return sc;
}

} // namespace model

namespace model::lease
{

const std::vector<scenario> &scenarios()
{
	static const std::vector<scenario> list = {
	    {.name = "lease-change", .peers = {{.writes = 3, .asks = 2}}, .changes = 2},
	    {.name = "lease-idle",
	     .peers = {{.writes = 2, .asks = 2}},
	     .changes = 1,
	     .copies = 1,
	     .idles = true},
	    {.name = "lease-lost",
	     .peers = {{.writes = 2, .asks = 1}},
	     .changes = 1,
	     .losses = 2,
	     .copies = 1},
	    {.name = "lease-given-up",
	     .peers = {{.writes = 1, .asks = 2}},
	     .changes = 1,
	     .losses = 1,
	     .give_ups = 1,
	     .slow = true},
	    {.name = "lease-slow",
	     .peers = {{.writes = 2, .asks = 2}},
	     .changes = 1,
	     .losses = 1,
	     .slow = true},
	    {.name = "lease-stopped",
	     .peers = {{.writes = 2, .asks = 1}},
	     .changes = 1,
	     .losses = 1,
	     .stops = true,
	     .vanishes = true},
	    {.name = "lease-two-peers",
	     .peers = {{.writes = 2, .asks = 1}, {.writes = 1, .asks = 1}},
	     .changes = 1},
	    {.name = "lease-two-peers-stopped",
	     .peers = {{.writes = 1, .asks = 1}, {.writes = 1, .asks = 1}},
	     .changes = 1,
	     .stops = true},
	    {.name = "lease-pressure",
	     .pages = 2,
	     .peers = {{.page = 0, .writes = 1, .asks = 1}, {.page = 1, .writes = 1, .asks = 2}},
	     .pressure = 1,
	     .bound = 1},
	    {.name = "lease-pressure-stopped",
	     .pages = 2,
	     .peers = {{.page = 0, .writes = 1, .asks = 1}, {.page = 1, .writes = 1, .asks = 1}},
	     .pressure = 1,
	     .bound = 1,
	     .stops = true},
	    {.name = "lease-queue-pair-ends",
	     .peers = {{.writes = 2, .asks = 2}},
	     .changes = 1,
	     .pressure = 1,
	     .slow = true,
	     .quits = true},
	    {.name = "lease-deregistered",
	     .peers = {{.writes = 2, .asks = 1}, {.writes = 1, .asks = 1}},
	     .deregisters = true},
	    {.name = "lease-deregistered-change",
	     .peers = {{.writes = 2, .asks = 2}},
	     .changes = 1,
	     .losses = 1,
	     .deregisters = true},
	    {.name = "lease-behind-send",
	     .peers = {{.writes = 2, .asks = 1, .sends = 1}},
	     .changes = 1,
	     .deregisters = true},
	    {.name = "lease-deregistered-stopped",
	     .peers = {{.writes = 1, .asks = 1}, {.writes = 1, .asks = 1}},
	     .deregisters = true,
	     .stops = true},
	    {.name = "lease-deregistered-away",
	     .peers = {{.writes = 2, .asks = 2}},
	     .changes = 1,
	     .deregisters = true,
	     .stops = true,
	     .vanishes = true},
	    {.name = "lease-deregistered-slow",
	     .peers = {{.writes = 2, .asks = 1}},
	     .changes = 1,
	     .losses = 1,
	     .deregisters = true,
	     .slow = true},
	};
	return list;
}

const scenario *find_scenario(std::string_view name)
{
	for (const scenario &sc : scenarios())
		if (sc.name == name)
			return &sc;
	return nullptr;
}

scenario deeper(scenario sc, unsigned more)
{
	for (u8 *budget : {&sc.changes, &sc.pressure, &sc.losses, &sc.copies, &sc.give_ups})
		if (*budget)
			*budget = static_cast<u8>(*budget + more);
	return sc;
}

} // namespace model::lease
