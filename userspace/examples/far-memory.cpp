/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Memory of another process, or host, as if it were here: a server lends a region, and a client sorts numbers
 * in it with less memory than they take.
 *
 *	far-memory server ADDRESS [FILE]	until it is killed
 *	far-memory client ADDRESS
 *	far-memory				both, in one process
 *
 * ADDRESS is shm:NAME on one host, or verbs:HOST:PORT.
 */
#include <nprdma/far_network.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <unistd.h>

namespace far = nprdma::far;
namespace transport = nprdma::transport;

namespace
{

constexpr std::uint64_t region_bytes = 16 << 20;

template <class T> T must(far::result<T> r)
{
	if (!r) {
		std::fprintf(stderr, "far-memory: %s\n", r.why().text.c_str());
		std::exit(1);
	}
	return std::move(*r);
}

void must(far::status s)
{
	if (!s) {
		std::fprintf(stderr, "far-memory: %s\n", s.why().text.c_str());
		std::exit(1);
	}
}

std::unique_ptr<far::server> serve(transport::context &context, const std::string &address,
				   const std::string &file)
{
	auto s = must(far::server::make(context, address));

	must(s->lend("numbers", region_bytes, 64 << 10, file));
	return s;
}

int sort(transport::context &context, const std::string &address)
{
	far::network_options how;
	how.code = far::coding::lz4;
	const auto store = must(far::network_store::open(context, address, "numbers", how));
	far::pager_options buffer;
	buffer.buffer_bytes = region_bytes / 4;
	const auto pager = must(far::pager::make(buffer));
	far::map_options map;
	map.page_bytes = store->page_bytes();
	const auto mapping = must(pager->map(store, map));

	auto *const first = reinterpret_cast<std::uint32_t *>(mapping->memory().data());
	auto *const end = first + mapping->memory().size() / sizeof(*first);
	std::uint32_t x = 1;
	for (auto *p = first; p != end; p++)
		*p = x = x * 1664525 + 1013904223;
	std::sort(first, end);
	const bool good = std::is_sorted(first, end);
	must(mapping->flush());

	const far::statistics s = mapping->stats();
	const far::network_statistics n = store->stats();
	std::printf("%s: %zu numbers in %llu MiB, of which %llu MiB were here at once\n",
		    good ? "sorted" : "WRONG", static_cast<std::size_t>(end - first),
		    static_cast<unsigned long long>(region_bytes >> 20),
		    static_cast<unsigned long long>(buffer.buffer_bytes >> 20));
	std::printf(
	    "pages: %llu on demand, %llu ahead, %llu never asked for; %llu MiB read, %llu MiB written\n",
	    static_cast<unsigned long long>(s.demand), static_cast<unsigned long long>(s.prefetched),
	    static_cast<unsigned long long>(s.empty), static_cast<unsigned long long>(n.bytes_read >> 20),
	    static_cast<unsigned long long>(n.bytes_written >> 20));
	return good ? 0 : 1;
}

} // namespace

int main(int argc, char **argv)
{
	const std::string role = argc > 1 ? argv[1] : "both";
	const std::string address = argc > 2 ? argv[2] : "shm:far-memory-" + std::to_string(::getpid());

	if ((role != "both" && role != "server" && role != "client") || (role != "both" && argc < 3)) {
		std::fprintf(stderr, "usage: %s [server ADDRESS [FILE] | client ADDRESS]\n", argv[0]);
		return 2;
	}
	const auto context = must(transport::open(address));
	std::unique_ptr<far::server> server;
	if (role != "client")
		server = serve(*context, address, argc > 3 ? argv[3] : "");
	if (role == "server") {
		std::printf("lends \"numbers\" at %s\n", server->address().c_str());
		std::fflush(stdout);
		for (;;)
			::pause();
	}
	/* A client has a context of its own, as it would in a process of its own. */
	const auto own = must(transport::open(address));
	return sort(*own, address);
}
