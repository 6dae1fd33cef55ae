// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma-alloc over an adapter: arenas that are registered unpinned, and RDMA between two of them while the
 * control group of this process has less memory than is in use. The owner's arena is on the first device, the
 * peer's on the second. Prints TAP.
 *
 * Each test is a process. The kernel counts leased pages in the control group in which their owner was when he
 * registered the region, and recalls them when memory of that group is short: so the process has to be in its group
 * before it registers anything.
 */
#include "ends.h"

#include <nprdma/alloc.hpp>
#include <nprdma/nprdma.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace {

namespace na = nprdma::alloc;

constexpr std::size_t kib = 1024, mib = 1024 * kib, gib = 1024 * mib;
constexpr auto group = "/sys/fs/cgroup/np_alloc";

void expect(bool true_, const std::string &what)
{
	if (!true_)
		throw std::runtime_error(what);
}

/* What a file has. */
std::string text_of(const std::string &path)
{
	std::ifstream f(path);
	return {std::istreambuf_iterator<char>(f), {}};
}

void write_text(const std::string &path, const std::string &text)
{
	std::ofstream f(path);
	f << text << std::flush;
	expect(f.good(), path + ": \"" + text + "\" cannot be written");
}

/* In KiB, of /proc/self/status. */
unsigned long status(const std::string &name)
{
	std::ifstream f("/proc/self/status");
	for (std::string word; f >> word;)
		if (word == name + ":") {
			unsigned long n = 0;
			f >> n;
			return n;
		}
	throw std::runtime_error("/proc/self/status has no " + name);
}

/* Where the time of a test goes. */
double seconds(const std::function<void()> &f)
{
	const auto begin = std::chrono::steady_clock::now();
	f();
	return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/* In seconds, of one call: an interruption of one says nothing of the others. */
double median_of(int rounds, const std::function<void()> &f)
{
	std::vector<double> took;
	for (int i = 0; i < rounds; i++)
		took.push_back(seconds(f));
	std::nth_element(took.begin(), took.begin() + rounds / 2, took.end());
	return took[static_cast<std::size_t>(rounds) / 2];
}

const char *state_of(ibv_qp *qp)
{
	static constexpr std::array<const char *, 8> names{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR", "UNKNOWN"};
	ibv_qp_attr attr{};
	ibv_qp_init_attr init{};

	if (const int error = ibv_query_qp(qp, &attr, IBV_QP_STATE, &init))
		return std::strerror(error);
	return names.at(std::min<std::size_t>(attr.qp_state, names.size() - 1));
}

/* Two connected ends, an arena at each, and libnprdma at the second. */
class world {
public:
	world()
	    : owner_end(open_end("mlx5_0")), peer_end(open_end("mlx5_1")), context(*peer_end.verbs),
	      cq(context.attach(*peer_end.cq))
	{
		connect_end(&owner_end, &peer_end);
		connect_end(&peer_end, &owner_end);
		npr_qp_attr attr{};
		attr.max_send_wr = 64;
		qp.emplace(cq.attach(*peer_end.qp, attr));
	}
	~world()
	{
		qp.reset();
		/* The verbs objects end with the process. */
	}

	/* One request, done. */
	void run(ibv_wr_opcode op, std::span<const std::byte> local, std::uint32_t lkey, std::uint64_t remote,
		 std::uint32_t rkey)
	{
		ibv_sge sge{reinterpret_cast<std::uintptr_t>(local.data()), static_cast<std::uint32_t>(local.size()), lkey};
		ibv_send_wr wr{}, *bad = nullptr;
		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = op;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = rkey;
		const int error = qp->post_send(wr, bad);
		expect(!error, std::string("post_send: ") + std::strerror(std::abs(error)));
		ibv_wc wc{};
		int n = 0;
		const double took = seconds([&] {
			while (!(n = cq.poll({&wc, 1})))
				;
		});
		expect(n == 1, std::string("poll: ") + std::strerror(-n));
		expect(wc.status == IBV_WC_SUCCESS, failure(wc, took));
		/* A busy machine does not explain that: see what it waited for. */
		if (took > 0.25)
			std::printf("# a request was slow: %s\n", failure(wc, took).c_str());
	}

	/*
	 * What is needed to tell who gave up: a vendor's error is of the adapter, 0 of the library; a QP in state ERR was
	 * ended by its adapter or by its kernel, which says why in its log.
	 */
	[[nodiscard]] std::string failure(const ibv_wc &wc, double took) const
	{
		const npr_stats s = qp->stats();
		std::array<char, 400> text{};
		(void)std::snprintf(text.data(), text.size(),
				    "%s after %.3f s, vendor_err %#x, QP of the peer %s, of the owner %s; of this QP: "
				    "%llu reads, %llu writes, %llu pages repeated, %llu faults, %llu busy, %llu holds, "
				    "%llu leases, %llu recalls",
				    ibv_wc_status_str(wc.status), took, wc.vendor_err, state_of(peer_end.qp), state_of(owner_end.qp),
				    count(s.reads), count(s.writes), count(s.repeated_pages), count(s.faults), count(s.busy),
				    count(s.holds), count(s.leases), count(s.recalls));
		return text.data();
	}
	[[nodiscard]] static unsigned long long count(std::uint64_t n) noexcept { return n; }

	end owner_end, peer_end;
	nprdma::context context;
	nprdma::cq cq;
	std::optional<nprdma::qp> qp;
};

void fill(std::span<std::byte> bytes, std::uint64_t seed)
{
	for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
		const std::uint64_t word = (seed << 32 | i) * 0x9e3779b97f4a7c15;
		std::memcpy(bytes.data() + i, &word, 8);
	}
}

std::uint64_t checksum(std::span<const std::byte> bytes)
{
	std::uint64_t sum = 0;
	for (std::size_t i = 0; i + 8 <= bytes.size(); i += 8) {
		std::uint64_t word;
		std::memcpy(&word, bytes.data() + i, 8);
		sum = (sum ^ word) * 0x100000001b3;
	}
	return sum;
}

/* More than the guest has: registered at once, and no page of it is there, or locked. */
void more_than_memory(world &w)
{
	const unsigned long pinned = status("VmPin"), locked = status("VmLck"), rss = status("VmRSS");
	na::verbs_registrar registrar(*w.owner_end.pd);
	std::optional<na::arena> a;
	const double took = seconds([&] { a.emplace(registrar, na::options{.name = "large", .capacity = 8 * gib}); });
	std::printf("# 8 GiB: %.2f ms\n", 1e3 * took);
	expect(a->resident() == 0, "pages are in memory");
	expect(status("VmPin") == pinned && status("VmLck") == locked, "memory is pinned");
	expect(status("VmRSS") < rss + 16 * kib, "memory is used");
	expect(registrar.count().made == 1, "more than one registration");
	void *const p = a->allocate(mib);
	std::memset(p, 1, mib);
	a->deallocate(p);
}

/* How much time an arena of 64 GiB takes: what the registration costs, too. */
void sixty_four_gib(world &w)
{
	na::verbs_registrar registrar(*w.owner_end.pd);
	double best = 1e9;
	for (int i = 0; i < 3; i++) {
		std::optional<na::arena> a;
		best = std::min(best, seconds([&] { a.emplace(registrar, na::options{.capacity = 64 * gib}); }));
		expect(a->locate(a->range().data() + 64 * gib - 1).rkey != 0, "it has no key");
	}
	std::printf("# 64 GiB: %.2f ms\n", 1e3 * best);
}

void several_domains(world &w)
{
	na::verbs_registrar one(*w.owner_end.pd), two(*w.peer_end.pd);
	const std::array<na::registrar *, 2> both{&one, &two};
	na::arena a(both, {.capacity = 64 * mib});
	na::verbs_registrar only(*w.owner_end.pd);
	na::arena target(only, {.capacity = 64 * mib});
	na::buffer from = a.acquire(64 * kib), to = target.acquire(64 * kib);
	fill(from.bytes(), 1);
	/* The peer's device sends, so its key is needed. */
	w.run(IBV_WR_RDMA_WRITE, from.bytes(), from.where(1).lkey, to.where().address(), to.where().rkey);
	expect(checksum(from.bytes()) == checksum(to.bytes()), "other data arrived");
	expect(one.count().made == 1 && two.count().made == 1, "more than one registration each");
}

/* 96 MiB at each end, in a control group of 64 MiB: most pages are on the disk when they are wanted. */
void while_memory_is_short(world &w)
{
	na::verbs_registrar owners(*w.owner_end.pd), peers(*w.peer_end.pd);
	na::arena from(peers, {.name = "peer", .capacity = gib}), to(owners, {.name = "owner", .capacity = gib});
	std::mt19937_64 random(7);
	struct pair {
		na::buffer source, target;
		std::uint64_t sum;
	};
	std::vector<pair> all;
	std::size_t bytes = 0;

	while (bytes < 96 * mib) {
		const std::size_t size = (64 + random() % (256 * kib)) & ~std::size_t{63};
		pair p{from.acquire(size), to.acquire(size), 0};
		fill(p.source.bytes(), all.size());
		fill(p.target.bytes(), ~all.size());
		p.sum = checksum(p.source.bytes());
		all.push_back(std::move(p));
		bytes += size;
	}
	const std::size_t there = from.resident() + to.resident();
	expect(there < 80 * mib, "memory is not short");
	std::shuffle(all.begin(), all.end(), random);
	for (const pair &p : all)
		w.run(IBV_WR_RDMA_WRITE, p.source.bytes(), p.source.where().lkey, p.target.where().address(),
		      p.target.where().rkey);
	for (const pair &p : all) {
		expect(checksum(p.target.bytes()) == p.sum, "a block arrived with other data");
		expect(checksum(p.source.bytes()) == p.sum, "a block that was sent changed");
	}
	const npr_stats s = w.qp->stats();
	std::printf("# %zu blocks, %zu MiB; resident %zu MiB of %zu; faults %llu\n", all.size(), bytes / mib, there / mib,
		    2 * bytes / mib, static_cast<unsigned long long>(s.faults));
	expect(s.faults > 0, "no page was asked for: memory was not short");
	expect(owners.count().made == 1 && peers.count().made == 1, "something was registered meanwhile");
	all.clear();
	(void)from.trim();
	(void)to.trim();
	expect(from.resident() + to.resident() < mib, "memory did not go back");
	/* The same keys, on memory that came and went. */
	na::buffer a = from.acquire(mib), b = to.acquire(mib);
	fill(a.bytes(), 5);
	w.run(IBV_WR_RDMA_WRITE, a.bytes(), a.where().lkey, b.where().address(), b.where().rkey);
	expect(checksum(a.bytes()) == checksum(b.bytes()), "other data arrived after trim()");
}

void discarded_pages(world &w)
{
	na::verbs_registrar owners(*w.owner_end.pd), peers(*w.peer_end.pd);
	na::arena from(peers, {.capacity = 64 * mib}), to(owners, {.capacity = 64 * mib});
	na::buffer local = from.acquire(mib), remote = to.acquire(mib);
	fill(local.bytes(), 1);
	w.run(IBV_WR_RDMA_WRITE, local.bytes(), local.where().lkey, remote.where().address(), remote.where().rkey);
	expect(checksum(local.bytes()) == checksum(remote.bytes()), "other data arrived");
	const na::location before = remote.where();
	expect(to.discard(remote.data(), mib) == mib, "not all was discarded");
	w.run(IBV_WR_RDMA_READ, local.bytes(), local.where().lkey, before.address(), before.rkey);
	expect(std::all_of(local.bytes().begin(), local.bytes().end(), [](std::byte b) { return b == std::byte{0}; }),
	       "a peer reads something else than zeros");
	fill(local.bytes(), 2);
	w.run(IBV_WR_RDMA_WRITE, local.bytes(), local.where().lkey, before.address(), before.rkey);
	expect(checksum(local.bytes()) == checksum(remote.bytes()), "other data arrived after discard()");
}

/* The peer READs a header, then what it says, and believes nothing that it has not checked. */
void objects(world &w)
{
	na::verbs_registrar owners(*w.owner_end.pd), peers(*w.peer_end.pd);
	na::arena there(owners, {.capacity = 64 * mib}), here(peers, {.capacity = 64 * mib});
	na::bundle<double, std::uint32_t> particles(there, na::type_id("particles"), {100000, 7});
	fill(particles.as_object().data(), 3);
	na::object o = na::pack(there, std::array{particles.as_object()});
	o.seal();
	const na::location at = o.pieces()[0].where;

	na::buffer header = here.acquire(sizeof(na::object_header));
	w.run(IBV_WR_RDMA_READ, header.bytes(), header.where().lkey, at.address(), at.rkey);
	na::object_header h;
	std::memcpy(&h, header.data(), sizeof(h));
	na::buffer whole = here.acquire(na::object::size_of(h));
	w.run(IBV_WR_RDMA_READ, whole.bytes(), whole.where().lkey, at.address(), at.rkey);
	const na::object arrived = na::object::accept(std::move(whole));
	expect(arrived.intact(), "the checksum is another one");
	expect(arrived == o, "the object is another one");
	const na::bundle<double, std::uint32_t> read{na::unpack(arrived).at(0)};
	expect(read.get<0>().size() == 100000 && read.as_object() == particles.as_object(), "the bundle is another one");
}

/* Room of the host's, not of an arena's, for a registration for each use. */
class pages {
public:
	explicit pages(std::size_t bytes)
	{
		void *const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

		if (p == MAP_FAILED)
			throw std::runtime_error(std::string("mmap: ") + std::strerror(errno));
		memory_ = {static_cast<std::byte *>(p), bytes};
	}
	~pages() { (void)munmap(memory_.data(), memory_.size()); }
	pages(const pages &) = delete;
	pages &operator=(const pages &) = delete;

	[[nodiscard]] std::span<std::byte> bytes() const { return memory_; }

private:
	std::span<std::byte> memory_;
};

/*
 * What a buffer of @size from an arena costs, and one with a registration for each use; with a WRITE of it, too, up to
 * 1 MiB: beyond, the emulated adapter's copy is all that would be seen.
 */
void reuse_of(world &w, std::size_t size, bool is_checked)
{
	const int rounds = size <= 4096 ? 200 : size <= mib ? 50 : 5;
	na::verbs_registrar owners(*w.owner_end.pd), unpinned(*w.peer_end.pd), pinned(*w.peer_end.pd, na::pinning::pinned);
	na::arena from(unpinned, {.capacity = 256 * mib}), to(owners, {.capacity = 256 * mib});
	const bool sends = size <= mib;
	na::buffer target = to.acquire(size);
	const na::location at = target.where();
	const pages own(std::max<std::size_t>(size, 4096));
	const auto write = [&](const std::byte *p, std::uint32_t lkey) {
		w.run(IBV_WR_RDMA_WRITE, {p, size}, lkey, at.address(), at.rkey);
	};
	const auto with_arena = [&](bool send) {
		const na::buffer b = from.acquire(size);
		if (send)
			write(b.data(), b.where().lkey);
	};
	const auto with_registration = [&](na::verbs_registrar &r, bool send) {
		const auto one = r.add(own.bytes().first(size));
		if (send)
			write(own.bytes().data(), one->keys().lkey);
	};
	for (int i = 0; i < rounds; i++)
		with_arena(sends);
	const std::uint64_t made = unpinned.count().made;
	/* Acquire and release are so quick that they are done many times. */
	const int times = size <= mib ? 100'000 : 10'000;
	const double arena = seconds([&] {
		for (int i = 0; i < times; i++)
			with_arena(false);
	}) / times;
	const double arena_write = sends ? median_of(rounds, [&] { with_arena(true); }) : 0;
	expect(unpinned.count().made == made, "something was registered after the warm-up");
	for (const auto &[name, r] : {std::pair{"pinned", &pinned}, std::pair{"unpinned", &unpinned}}) {
		const double registered = median_of(rounds, [&, &by = *r] { with_registration(by, false); });
		std::printf("# %zu bytes, %s registration for each use: %.0f ns, %.0f times an arena's acquire and release", size,
			    name, registered * 1e9, registered / arena);
		if (sends) {
			const double registered_write = median_of(rounds, [&, &by = *r] { with_registration(by, true); });
			std::printf("; with a WRITE %.2f times", registered_write / arena_write);
			expect(!is_checked || registered_write > arena_write, "reuse is no gain");
		}
		std::printf("\n");
		expect(!is_checked || registered / arena >= 1000, std::string("less than 1000 times as quick as ") + name);
	}
}

/* 4 KiB is what the aim is for. */
void reuse(world &w)
{
	for (const std::size_t size : {std::size_t{64}, std::size_t{4096}, std::size_t{65536}, mib, 64 * mib})
		reuse_of(w, size, size == 4096);
}

struct test {
	const char *name;
	void (*run)(world &);
	bool in_group = false;
};

constexpr test tests[] = {
	{"an_arena_larger_than_memory_is_registered_and_takes_none", more_than_memory},
	{"an_arena_of_64_gib_has_a_key", sixty_four_gib},
	{"an_arena_is_known_to_several_domains", several_domains},
	{"writes_between_arenas_arrive_while_memory_is_short", while_memory_is_short, true},
	{"discarded_pages_are_zeros_to_peers_and_keys_stay", discarded_pages},
	{"objects_are_read_by_their_headers", objects},
	{"reuse_is_1000_times_as_cheap_as_registering", reuse},
};

/* In a process of its own: its QPs, regions and limits end with it. */
bool passes(const test &t)
{
	std::fflush(stdout);
	const pid_t child = fork();
	if (child < 0)
		throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
	if (!child) {
		int status = 1;
		try {
			if (t.in_group)
				write_text(std::string(group) + "/cgroup.procs", "0");
			world w;
			t.run(w);
			status = 0;
		} catch (const std::exception &e) {
			std::printf("# %s\n", e.what());
		}
		std::fflush(stdout);
		_exit(status);
	}
	int status = 0;
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			throw std::runtime_error(std::string("waitpid: ") + std::strerror(errno));
	if (WIFSIGNALED(status))
		std::printf("# ended by signal %d\n", WTERMSIG(status));
	if (status && t.in_group) {
		std::istringstream events(text_of(std::string(group) + "/memory.events"));
		for (std::string line; std::getline(events, line);)
			std::printf("# memory.events: %s\n", line.c_str());
	}
	return !status;
}

} // namespace

/* An argument is part of the names of the tests that are wanted. */
int main(int argc, char **argv)
{
	int failed = 0, n = 0;
	std::vector<test> wanted;

	std::copy_if(std::begin(tests), std::end(tests), std::back_inserter(wanted),
		     [&](const test &t) { return argc < 2 || std::strstr(t.name, argv[1]); });

	try {
		expect(std::ifstream("/sys/fs/cgroup/cgroup.controllers").good(),
		       "/sys/fs/cgroup is no cgroup2 file system: this test runs in a guest, by scripts/vm run");
		write_text("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
		(void)mkdir(group, 0755);
		write_text(std::string(group) + "/memory.max", "64M");
	} catch (const std::exception &e) {
		std::printf("Bail out! %s\n", e.what());
		return 1;
	}
	std::printf("1..%zu\n", wanted.size());
	try {
		for (const test &t : wanted) {
			const bool ok = passes(t);
			std::printf("%s %d %s\n", ok ? "ok" : "not ok", ++n, t.name);
			failed += !ok;
		}
	} catch (const std::exception &e) {
		std::printf("Bail out! %s\n", e.what());
		failed++;
	}
	(void)rmdir(group);
	return failed != 0;
}
