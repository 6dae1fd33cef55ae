/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A program for UMap's headers with network stores, and nothing of ours: a server and its clients. It ends
 * with 0 if all data were as they should be. umap_remote_test.cpp runs it.
 */
#include "umap/store/StoreNetwork.h"
#include "umap/umap.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace
{

int usage()
{
	std::fprintf(
	    stderr, "usage: umap_remote lend WORDS FIRST CLIENTS | lend-by-call WORDS | read WORDS | write | "
		    "own-server | own-client SERVER WORDS\n");
	return 64;
}

/* Where the first word is not @first + @step * i, if any. */
int check(const std::uint64_t *words, std::size_t n, std::uint64_t first, std::uint64_t step)
{
	for (std::size_t i = 0; i < n; i++)
		if (words[i] != first + step * i) {
			std::fprintf(stderr, "word %zu of %zu is %llu\n", i, n,
				     static_cast<unsigned long long>(words[i]));
			return 1;
		}
	return 0;
}

/* Lends two arrays until its clients have gone. "write" doubles the first one. */
int lend(std::size_t words, std::uint64_t first, std::size_t clients)
{
	auto *const numbers = static_cast<std::uint64_t *>(std::malloc(words * 8));
	std::vector<std::uint64_t> others(words);

	for (std::size_t i = 0; i < words; i++) {
		numbers[i] = first + i;
		others[i] = 7;
	}
	Umap::Store *a = new Umap::StoreNetworkServer("numbers", numbers, words * 8, clients);
	Umap::Store *b = new Umap::StoreNetworkServer("others", others.data(), words * 8);
	std::printf("lent\n");
	std::fflush(stdout);
	delete a;
	delete b;
	const int result =
	    clients > 1 ? check(numbers, words, 2 * first, 2) : check(numbers, words, first, 1);
	std::free(numbers);
	return result;
}

int lend_by_call(std::size_t words)
{
	std::vector<std::uint64_t> numbers(words);

	for (std::size_t i = 0; i < words; i++)
		numbers[i] = i;
	if (umap_network("numbers", numbers.data(), words * 8) != numbers.data())
		return 1;
	std::printf("lent\n");
	std::fflush(stdout);
	/* Until it is told to end, and then until its clients have gone. */
	(void)std::getchar();
	return uunmap(numbers.data(), words * 8) ? 1 : 0;
}

int read_numbers(std::size_t words)
{
	auto *const a = static_cast<std::uint64_t *>(umap_network("numbers", nullptr, words * 8));

	if (a == UMAP_FAILED)
		return 2;
	int result = check(a, words, 0, 1);
	if (umap_evict() || check(a, words, 0, 1))
		result = 1;
	return uunmap(a, words * 8) ? 3 : result;
}

int write_numbers()
{
	Umap::StoreNetworkClient *store = new Umap::StoreNetworkClient("numbers", 0);
	const std::size_t bytes = store->get_size();
	void *const mapped =
	    Umap::umap_ex(nullptr, bytes, PROT_READ | PROT_WRITE, UMAP_PRIVATE, -1, 0, store);

	if (mapped == UMAP_FAILED)
		return 2;
	auto *const a = static_cast<std::uint64_t *>(mapped);
	for (std::size_t i = 0; i < bytes / 8; i++)
		a[i] *= 2;
	if (umap_flush() || uunmap(a, 0))
		return 3;
	delete store;
	return 0;
}

int own_server()
{
	Umap::NetworkServer server;

	std::printf("lent\n");
	std::fflush(stdout);
	server.wait_till_disconnect();
	return 0;
}

int own_client(const char *server, std::size_t words)
{
	const auto client = std::make_unique<Umap::NetworkClient>(server);
	std::unique_ptr<Umap::Store> stores[3];
	std::uint64_t *arrays[3];
	int result = 0;

	/* The last two have one name, and are two arrays. */
	for (int i = 0; i < 3; i++) {
		stores[i].reset(new Umap::StoreNetwork(i ? "more" : "first", words * 8, client.get()));
		void *const a = Umap::umap_ex(nullptr, words * 8, PROT_READ | PROT_WRITE, UMAP_PRIVATE, 0, 0,
					      stores[i].get());
		if (a == UMAP_FAILED)
			return 2;
		arrays[i] = static_cast<std::uint64_t *>(a);
	}
	for (std::uint64_t round = 1; round <= 2; round++) {
		for (std::uint64_t k = 0; k < 3; k++)
			for (std::size_t i = 0; i < words; i++)
				arrays[k][i] = round * (k + 1) * i;
		for (std::uint64_t k = 0; k < 3; k++)
			result |= check(arrays[k], words, 0, round * (k + 1));
	}
	for (std::uint64_t *const a : arrays)
		if (uunmap(a, 0))
			return 3;
	return result;
}

} // namespace

int main(int argc, char **argv)
{
	const auto is = [&](const char *what, int arguments) {
		return argc == arguments + 2 && !std::strcmp(argv[1], what);
	};
	const auto number = [&](int i) {
		return static_cast<std::size_t>(std::strtoull(argv[i], nullptr, 10));
	};

	try {
		if (is("lend", 3))
			return lend(number(2), number(3), number(4));
		if (is("lend-by-call", 1))
			return lend_by_call(number(2));
		if (is("read", 1))
			return read_numbers(number(2));
		if (is("write", 0))
			return write_numbers();
		if (is("own-server", 0))
			return own_server();
		if (is("own-client", 2))
			return own_client(argv[2], number(3));
	} catch (const std::exception &e) {
		std::fprintf(stderr, "%s\n", e.what());
		return 4;
	}
	return usage();
}
