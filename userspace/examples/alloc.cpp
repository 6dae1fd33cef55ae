/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Memory that is registered once, and what can be put into it. "alloc mlx5_0" uses an adapter, "alloc" does without. */
#include <nprdma/alloc.hpp>

#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace na = nprdma::alloc;

static std::unique_ptr<na::registrar> make_registrar(const char *device)
{
	if (!device)
		return std::make_unique<na::host_registrar>();
	int n = 0;
	ibv_device **const list = ibv_get_device_list(&n);
	for (int i = 0; i < n; i++)
		if (!std::strcmp(ibv_get_device_name(list[i]), device))
			if (ibv_context *const verbs = ibv_open_device(list[i]))
				if (ibv_pd *const pd = ibv_alloc_pd(verbs))
					return std::make_unique<na::verbs_registrar>(*pd);
	throw std::runtime_error(std::string("no such device, or it cannot be opened: ") + device);
}

int main(int argc, char **argv)
try {
	const auto registrar = make_registrar(argc > 1 ? argv[1] : nullptr);

	/* 64 GiB of addresses under one key. Memory is taken when it is used. */
	na::arena arena(*registrar, {.name = "example", .capacity = std::size_t{64} << 30});

	/* A block, and what a peer needs to reach it. */
	na::buffer block = arena.acquire(4096);
	const na::location at = block.where();
	std::printf("block: lkey %#x, rkey %#x, address %#llx\n", at.lkey, at.rkey,
		    static_cast<unsigned long long>(at.address()));

	/* A container of the standard library whose elements are registered. */
	std::pmr::vector<double> samples(100000, 0.5, &arena);
	std::printf("vector: %zu bytes into the registration\n",
		    static_cast<std::size_t>(arena.locate(samples.data()).offset));

	/* Something to send: two arrays behind a header that tells a peer what it gets. */
	na::bundle<double, std::uint32_t> particles(arena, na::type_id("particles"), {1000, 10});
	particles.get<0>()[0] = 1.5;
	const na::object arrived = na::object::copy_of(arena, particles.as_object().pieces()[0].bytes);
	std::printf("object: %zu bytes, %s\n", arrived.size(), arrived == particles.as_object() ? "equal" : "DIFFERENT");

	/* What is not needed goes back to the system, and the key stays. */
	samples.clear();
	samples.shrink_to_fit();
	arena.trim();
	const na::statistics s = arena.stats();
	std::printf("in use: %zu bytes in %llu blocks; registrations: %llu\n", s.used,
		    static_cast<unsigned long long>(s.blocks), static_cast<unsigned long long>(s.registrations));
	return !(arrived == particles.as_object()) || s.registrations != 1 || arena.locate(block.data()).rkey != at.rkey;
} catch (const std::exception &e) {
	std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
	return 1;
}
