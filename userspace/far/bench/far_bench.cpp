/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The figures of nprdma-far: one JSON object a line, for scripts/far-figures. What is compared is measured in
 *one run, in turns.
 *
 *	far_bench [latency|fill|steps|workers|coding|stream|buffer|unmap]... [--file PATH] [--doubles PATH]
 *		  [--verbs SERVER,CLIENT]
 *
 * --file: where a file is made, for latency; --doubles: data for coding; --verbs: the server and its client
 *are these two devices of this host, for fill, steps and buffer, instead of shared memory.
 */
#include <nprdma/far_network.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <functional>
#include <linux/userfaultfd.h>
#include <map>
#include <poll.h>
#include <random>
#include <string>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{

using namespace nprdma::far;
namespace transport = nprdma::transport;
using std::chrono::steady_clock;

std::string file_path = "far-bench.data", doubles_path, server_device, client_device;

[[noreturn]] void die(const std::string &what)
{
	std::fprintf(stderr, "far_bench: %s\n", what.c_str());
	std::exit(1);
}

template <class T> T must(result<T> r)
{
	if (!r)
		die(r.why().text);
	return std::move(*r);
}

void must(status s)
{
	if (!s)
		die(s.why().text);
}

double seconds_of(const std::function<void()> &f)
{
	const auto begin = steady_clock::now();

	f();
	return std::chrono::duration<double>(steady_clock::now() - begin).count();
}

double median(std::vector<double> v)
{
	std::sort(v.begin(), v.end());
	return v[v.size() / 2];
}

/* The ordinary way, to compare with: anonymous memory, a read into a buffer, and UFFDIO_COPY. */
class copying
{
public:
	copying(std::shared_ptr<store> from, unsigned fillers, std::size_t page)
	    : from_(std::move(from)), page_(page)
	{
		fd_ = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
		uffdio_api api{};
		api.api = UFFD_API;
		bytes_ = from_->bytes();
		base_ = static_cast<std::byte *>(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
							MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
		uffdio_register r{};
		r.range = {reinterpret_cast<std::uintptr_t>(base_), bytes_};
		r.mode = UFFDIO_REGISTER_MODE_MISSING;
		if (fd_ < 0 || ::ioctl(fd_, UFFDIO_API, &api) || base_ == MAP_FAILED ||
		    ::ioctl(fd_, UFFDIO_REGISTER, &r))
			die("userfaultfd");
		/* As large pages as the other way's are; registered once, so that nothing is copied on the
		 * way. */
		buffers_ = static_cast<std::byte *>(::mmap(nullptr, fillers * page_, PROT_READ | PROT_WRITE,
							   MAP_SHARED | MAP_ANONYMOUS, -1, 0));
		if (buffers_ == MAP_FAILED)
			die("buffers");
		buffer_bytes_ = fillers * page_;
		must(from_->attach({buffers_, buffer_bytes_}));
		for (unsigned i = 0; i < fillers; i++)
			threads_.emplace_back([this, i] { serve(buffers_ + i * page_); });
	}
	~copying()
	{
		stop_ = true;
		for (auto &t : threads_)
			t.join();
		from_->detach({buffers_, buffer_bytes_});
		::munmap(buffers_, buffer_bytes_);
		::munmap(base_, bytes_);
		::close(fd_);
	}
	[[nodiscard]] std::byte *memory() const { return base_; }

private:
	void serve(std::byte *at)
	{
		while (!stop_) {
			uffd_msg m;
			pollfd p = {fd_, POLLIN, 0};

			if (::read(fd_, &m, sizeof(m)) != sizeof(m)) {
				(void)::poll(&p, 1, 20);
				continue;
			}
			const std::uint64_t offset =
			    (m.arg.pagefault.address - reinterpret_cast<std::uintptr_t>(base_)) / page_ *
			    page_;
			must(from_->read({offset, {at, page_}}));
			uffdio_copy c{};
			c.dst = reinterpret_cast<std::uintptr_t>(base_) + offset;
			c.src = reinterpret_cast<std::uintptr_t>(at);
			c.len = page_;
			while (::ioctl(fd_, UFFDIO_COPY, &c) && errno == EAGAIN)
				;
		}
	}

	std::shared_ptr<store> from_;
	const std::size_t page_;
	int fd_;
	std::size_t bytes_, buffer_bytes_;
	std::byte *base_, *buffers_;
	std::atomic<bool> stop_ = false;
	std::vector<std::thread> threads_;
};

/* Each page once, in a random order, by @threads. Microseconds. */
void latency_of(const char *what, unsigned threads, std::byte *base, std::size_t pages)
{
	std::vector<std::uint32_t> order(pages);
	std::vector<std::vector<float>> took(threads);
	std::vector<std::thread> t;
	std::minstd_rand random(threads);

	for (std::uint32_t i = 0; i < pages; i++)
		order[i] = i;
	std::shuffle(order.begin(), order.end(), random);
	const double all = seconds_of([&] {
		for (unsigned n = 0; n < threads; n++)
			t.emplace_back([&, n] {
				for (std::size_t i = n; i < pages; i += threads) {
					const auto begin = steady_clock::now();

					(void)*const_cast<volatile std::byte *>(base +
										std::size_t{order[i]} * 4096);
					took[n].push_back(std::chrono::duration<float, std::micro>(
							      steady_clock::now() - begin)
							      .count());
				}
			});
		for (auto &x : t)
			x.join();
	});
	std::vector<float> flat;
	for (const auto &v : took)
		flat.insert(flat.end(), v.begin(), v.end());
	std::sort(flat.begin(), flat.end());
	std::printf("{\"figure\": \"latency\", \"what\": \"%s\", \"threads\": %u, \"p50_us\": %.2f, "
		    "\"p99_us\": %.2f, "
		    "\"pages_per_s\": %.0f}\n",
		    what, threads, static_cast<double>(flat[flat.size() / 2]),
		    static_cast<double>(flat[flat.size() * 99 / 100]), static_cast<double>(pages) / all);
}

void latency()
{
	constexpr std::size_t pages = 8192;
	{
		std::ofstream f(file_path, std::ios::binary);
		std::vector<char> page(4096);
		std::mt19937_64 random(1);
		for (std::size_t i = 0; i < pages; i++) {
			for (std::size_t j = 0; j < page.size(); j += 8)
				reinterpret_cast<std::uint64_t &>(page[j]) = random();
			f.write(page.data(), static_cast<std::streamsize>(page.size()));
		}
	}
	const int fd = ::open(file_path.c_str(), O_RDONLY | O_CLOEXEC);
	if (fd < 0 || ::fsync(fd))
		die(file_path);
	const auto drop = [&] {
		if (::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
			die("posix_fadvise");
	};
	for (const unsigned threads : {1u, 8u, 32u}) {
		drop();
		{
			void *const p = ::mmap(nullptr, pages * 4096, PROT_READ, MAP_PRIVATE, fd, 0);
			/* Random, as for the others: nobody reads ahead. */
			(void)::madvise(p, pages * 4096, MADV_RANDOM);
			latency_of("mmap of the file", threads, static_cast<std::byte *>(p), pages);
			::munmap(p, pages * 4096);
		}
		drop();
		{
			const copying c(must(file_store(file_path, {.read_only = true})), 8, 4096);
			latency_of("UFFDIO_COPY", threads, c.memory(), pages);
		}
		drop();
		{
			const auto p = must(pager::make({.fillers = 8, .prefetch = 0}));
			const auto m = must(
			    p->map(must(file_store(file_path, {.read_only = true})), {.read_only = true}));
			latency_of("nprdma-far", threads, m->memory().data(), pages);
		}
	}
	::close(fd);
	::unlink(file_path.c_str());
}

/* A region of a server of this process, behind a link that is emulated, or two devices. */
struct remote_region {
	explicit remote_region(std::uint64_t bytes, double rate = 0, std::chrono::microseconds delay = {},
			       std::size_t page = 4096)
	{
		static int number;
		transport::options link;
		if (server_device.empty()) {
			link.bytes_per_second = rate;
			link.latency = delay;
			here = must(transport::open("shm", link));
			there = must(transport::open("shm", link));
			address =
			    "shm:far-bench-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
		} else {
			link.device = client_device;
			here = must(transport::open("verbs", link));
			link.device = server_device;
			there = must(transport::open("verbs", link));
			address = "verbs:127.0.0.1:" + std::to_string(7300 + number++);
		}
		serving = must(server::make(*there, address));
		must(serving->lend("r", bytes, page));
	}
	std::shared_ptr<network_store> open(network_options how = {})
	{
		/* A machine that is busy must not end it. */
		how.deadline = std::chrono::minutes(2);
		for (;;) {
			auto s = network_store::open(*here, address, "r", how);
			if (s)
				return *s;
			if (s.code() != EBUSY)
				die(s.why().text);
			std::this_thread::yield();
		}
	}
	std::unique_ptr<transport::context> here, there;
	std::string address;
	std::unique_ptr<server> serving;
};

/* Seconds that the writing took, without the making. */
double write_all(store &to, std::size_t page,
		 const std::function<void(std::span<std::byte>, std::uint64_t)> &make)
{
	std::vector<std::byte> memory(64 * page);
	double took = 0;

	for (std::uint64_t at = 0; at < to.bytes(); at += memory.size()) {
		std::vector<piece> pieces;
		for (std::uint64_t i = at; i < std::min<std::uint64_t>(at + memory.size(), to.bytes());
		     i += page) {
			const std::span<std::byte> one(memory.data() + (i - at), page);
			make(one, i);
			pieces.push_back({i, one});
		}
		took += seconds_of([&] { must(to.write_many(pieces)); });
	}
	return took;
}

void noise(std::span<std::byte> page, std::uint64_t seed)
{
	std::mt19937_64 random(seed + 1);

	for (std::size_t i = 0; i < page.size(); i += 8)
		reinterpret_cast<std::uint64_t &>(page[i]) = random();
}

/* Every page by somebody's touch, by READs of a server's memory: in place, and by way of a buffer. */
void fill()
{
	for (const std::size_t page : {std::size_t{4096}, std::size_t{65536}, std::size_t{1} << 20}) {
		/* A guest has less memory, and an emulated CPU. */
		const std::uint64_t bytes = !server_device.empty() ? 16 << 20
					    : page == 4096         ? 64 << 20
								   : 256 << 20;
		remote_region r(bytes, 0, {}, page);
		const auto s = r.open({.checksums = false});
		write_all(*s, page, noise);
		std::vector<double> in_place, copied;
		const auto touch = [&](std::byte *base) {
			std::vector<std::thread> t;
			for (std::size_t n = 0; n < 2; n++)
				t.emplace_back([&, n] {
					for (std::uint64_t at = n * page; at < bytes; at += 2 * page)
						(void)*const_cast<volatile std::byte *>(base + at);
				});
			for (auto &x : t)
				x.join();
		};
		for (int round = 0; round < 5; round++) {
			{
				const copying c(s, 2, page);
				copied.push_back(seconds_of([&] { touch(c.memory()); }));
			}
			{
				const auto p = must(
				    pager::make({.buffer_bytes = 2 * bytes, .fillers = 2, .prefetch = 0}));
				const auto m = must(p->map(s, {.page_bytes = page}));
				in_place.push_back(seconds_of([&] { touch(m->memory().data()); }));
			}
		}
		const double a = static_cast<double>(bytes) / median(in_place),
			     b = static_cast<double>(bytes) / median(copied);
		std::printf("{\"figure\": \"fill\", \"over\": \"%s\", \"page\": %zu, "
			    "\"in_place_bytes_per_s\": %.0f, \"copy_bytes_per_s\": %.0f, \"ratio\": %.3f}\n",
			    server_device.empty() ? "shm" : "verbs", page, a, b, a / b);
		std::fflush(stdout);
	}
}

/*
 * Where the time of a fill goes: each step by itself for all pages, without threads, faults or a store. In
 * batches: frames are made, and mapped, 64 at a time. Kept: the frames are there already, and were read into
 * before. Over verbs the step "read" is a READ by the adapter.
 */
void steps()
{
	constexpr std::size_t page = 4096;
	const std::size_t pages = server_device.empty() ? 8192 : 1024, bytes = pages * page;
	constexpr int rounds = 7;
	std::map<std::pair<std::string, std::string>, std::vector<double>> took;
	std::vector<std::byte> from(bytes, std::byte{5}), buffer(page);
	const pid_t self = ::getpid();
	std::unique_ptr<remote_region> far;
	std::shared_ptr<network_store> store;
	if (!server_device.empty()) {
		far = std::make_unique<remote_region>(bytes);
		store = far->open({.checksums = false});
		write_all(*store, page, noise);
		must(store->attach(buffer));
	}
	const auto attach = [&](std::byte *frames) {
		if (store)
			must(store->attach({frames, bytes}));
	};
	const auto detach = [&](std::byte *frames) {
		if (store)
			store->detach({frames, bytes});
	};
	const auto read = [&](std::byte *to, std::size_t at) {
		if (store)
			return must(store->read({at, {to, page}}));
		const iovec local = {to, page}, remote = {from.data() + at, page};

		if (::process_vm_readv(self, &local, 1, &remote, 1, 0) != static_cast<ssize_t>(page))
			die("process_vm_readv");
	};
	const auto touch = [](const std::byte *at) { (void)*const_cast<const volatile std::byte *>(at); };
	const auto mapped = [&](int fd) {
		void *const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
				       fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);

		if (p == MAP_FAILED)
			die("mmap");
		return static_cast<std::byte *>(p);
	};
	const auto watched = [&](std::byte *base, std::uint64_t mode) {
		const int fd = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
		uffdio_api api{};
		uffdio_register r{};

		api.api = UFFD_API;
		api.features = UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_MISSING_SHMEM;
		r.range = {reinterpret_cast<std::uintptr_t>(base), bytes};
		r.mode = mode;
		if (fd < 0 || ::ioctl(fd, UFFDIO_API, &api) || ::ioctl(fd, UFFDIO_REGISTER, &r))
			die("userfaultfd");
		return fd;
	};
	const auto step = [&](const char *way, const char *what, std::size_t batch, const auto &f) {
		took[{way, what}].push_back(seconds_of([&] {
						    for (std::size_t at = 0; at < bytes; at += batch * page)
							    f(at);
					    }) /
					    static_cast<double>(pages) * 1e6);
	};

	for (int round = 0; round < rounds; round++) {
		{
			std::byte *const base = mapped(-1);
			const int fd = watched(base, UFFDIO_REGISTER_MODE_MISSING);

			step("copy", "1 read into a buffer", 1,
			     [&](std::size_t at) { read(buffer.data(), at); });
			step("copy", "2 UFFDIO_COPY", 1, [&](std::size_t at) {
				uffdio_copy c{};

				c.dst = reinterpret_cast<std::uintptr_t>(base) + at;
				c.src = reinterpret_cast<std::uintptr_t>(buffer.data());
				c.len = page;
				if (::ioctl(fd, UFFDIO_COPY, &c))
					die("UFFDIO_COPY");
			});
			step("copy", "3 touch", 1, [&](std::size_t at) { touch(base + at); });
			::munmap(base, bytes);
			::close(fd);
		}
		for (const char *way : {"in place", "in batches", "kept"}) {
			const std::size_t batch = *way == 'i' && way[3] == 'b' ? 64 : 1;
			const int frames = ::memfd_create("far-bench", MFD_CLOEXEC);

			if (frames < 0 || ::ftruncate(frames, bytes))
				die("memfd");
			std::byte *const alias = mapped(frames), *const base = mapped(frames);
			attach(alias);
			const int fd =
			    watched(base, UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR);
			const auto make = [&](std::size_t at) {
				if (::madvise(alias + at, batch * page, MADV_POPULATE_WRITE))
					die("MADV_POPULATE_WRITE");
			};

			if (*way == 'k')
				for (std::size_t at = 0; at < bytes; at += page) {
					make(at);
					read(alias + at, at);
				}
			else
				step(way, "1 make the frame", batch, make);
			step(way, "2 read into it", 1, [&](std::size_t at) { read(alias + at, at); });
			step(way, "3 UFFDIO_CONTINUE", batch, [&](std::size_t at) {
				uffdio_continue c{};

				c.range = {reinterpret_cast<std::uintptr_t>(base) + at, batch * page};
				if (::ioctl(fd, UFFDIO_CONTINUE, &c))
					die("UFFDIO_CONTINUE");
			});
			step(way, "4 touch", 1, [&](std::size_t at) { touch(base + at); });
			detach(alias);
			::munmap(alias, bytes);
			::munmap(base, bytes);
			::close(frames);
			::close(fd);
		}
		std::byte *const plain = mapped(-1);
		(void)::madvise(plain, bytes, MADV_NOHUGEPAGE);
		if (::madvise(plain, bytes, MADV_POPULATE_WRITE))
			die("MADV_POPULATE_WRITE");
		step("plain memory, populated", "touch", 1, [&](std::size_t at) { touch(plain + at); });
		step("plain memory, populated", "touch again", 1, [&](std::size_t at) { touch(plain + at); });
		::munmap(plain, bytes);
	}
	for (const auto &[name, us] : took)
		std::printf("{\"figure\": \"steps\", \"over\": \"%s\", \"way\": \"%s\", \"step\": \"%s\", "
			    "\"us\": %.3f}\n",
			    server_device.empty() ? "shm" : "verbs", name.first.c_str(), name.second.c_str(),
			    median(us));
	if (store)
		store->detach(buffer);
}

/* A link of 200 us: how many transfers at once does it take? Read and write, twice what fits. */
void workers()
{
	constexpr std::uint64_t bytes = 16 << 20;
	remote_region r(bytes, 0, std::chrono::microseconds(200));
	/* What was never written would not be read. */
	write_all(*r.open(), 4096, noise);
	for (const unsigned fillers : {1u, 2u, 4u, 8u, 16u, 32u})
		for (const unsigned evictors : {1u, 2u, 4u}) {
			const auto s = r.open({.checksums = false, .lanes = fillers + evictors});
			const auto p = must(pager::make({.buffer_bytes = bytes / 2,
							 .fillers = fillers,
							 .evictors = evictors,
							 .prefetch = 0}));
			auto m = must(p->map(s));
			std::byte *const base = m->memory().data();
			const double took = seconds_of([&] {
				std::vector<std::thread> t;
				for (std::size_t n = 0; n < 32; n++)
					t.emplace_back([&, n] {
						for (std::uint64_t at = n * 4096; at < bytes; at += 32 * 4096)
							base[at + n] = std::byte{1};
					});
				for (auto &x : t)
					x.join();
			});
			const pager_options usual;
			std::printf("{\"figure\": \"workers\", \"fillers\": %u, \"evictors\": %u, "
				    "\"pages_per_s\": %.0f, \"default\": %s}\n",
				    fillers, evictors, static_cast<double>(bytes / 4096) / took,
				    fillers == usual.fillers && evictors == usual.evictors ? "true"
											   : "false");
			must(m->unmap());
		}
}

/* What Debian packages: the text of licences and of this project's compiler's headers. */
std::vector<std::byte> text()
{
	std::vector<std::byte> all;

	for (const char *name :
	     {"/usr/share/common-licenses/GPL-3", "/usr/share/common-licenses/Apache-2.0",
	      "/usr/share/common-licenses/MPL-2.0", "/usr/share/common-licenses/LGPL-2.1"}) {
		std::ifstream f(name, std::ios::binary);
		for (char c; f.get(c);)
			all.push_back(static_cast<std::byte>(c));
	}
	if (all.empty())
		die("/usr/share/common-licenses is empty");
	return all;
}

/* Doubles of a file, or else of a smooth function. */
std::vector<std::byte> doubles()
{
	std::vector<std::byte> all;

	if (doubles_path.empty()) {
		for (std::size_t i = 0; i < 1 << 17; i++) {
			const double x = static_cast<double>(i) * 1e-4;
			const double v = std::sin(x) + 0.3 * std::cos(7.1 * x);
			const std::byte *const at = reinterpret_cast<const std::byte *>(&v);
			all.insert(all.end(), at, at + sizeof(v));
		}
		return all;
	}
	std::ifstream f(doubles_path, std::ios::binary);
	for (char c; f.get(c);)
		all.push_back(static_cast<std::byte>(c));
	if (all.empty() || all.size() % sizeof(double))
		die(doubles_path + ": no doubles");
	return all;
}

void coding_gain()
{
	constexpr std::uint64_t bytes = 16 << 20;
	constexpr std::size_t page = 65536;
	constexpr double rate = 50e6;
	constexpr std::size_t rounds = 7;
	/* Of what was measured side by side. */
	const auto median_ratio = [](const std::vector<double> &a, const std::vector<double> &b) {
		std::vector<double> r;
		for (std::size_t i = 0; i < a.size(); i++)
			r.push_back(a[i] / b[i]);
		return median(r);
	};
	const auto repeated = [](std::vector<std::byte> from) {
		return [from = std::move(from)](std::span<std::byte> to, std::uint64_t at) {
			for (std::size_t i = 0; i < to.size(); i++)
				to[i] = from[(at + i) % from.size()];
		};
	};
	struct data {
		const char *name;
		std::function<void(std::span<std::byte>, std::uint64_t)> make;
	};
	for (const data &d :
	     {data{"text", repeated(text())}, data{"doubles", repeated(doubles())}, data{"noise", noise}}) {
		struct coded {
			coding code;
			const char *name;
			std::unique_ptr<remote_region> region;
			std::shared_ptr<network_store> store;
			std::vector<double> read, write;
			double moved = 0;
		};
		std::vector<coded> all;
		all.push_back({coding::raw, "raw", {}, {}, {}, {}});
		all.push_back({coding::lz4, "LZ4", {}, {}, {}, {}});
		all.push_back({coding::zfp_64, "ZFP", {}, {}, {}, {}});
		for (coded &c : all) {
			/* Each one's link is its own. */
			c.region =
			    std::make_unique<remote_region>(bytes, rate, std::chrono::microseconds(10), page);
			c.store = c.region->open({.code = c.code, .error_bound = 1e-4});
		}
		for (std::size_t round = 0; round < rounds; round++)
			for (coded &c : all) {
				c.write.push_back(write_all(*c.store, page, d.make));
				const std::uint64_t before = c.store->stats().bytes_read;
				const auto p = must(pager::make({.buffer_bytes = 4 * bytes}));
				const auto m = must(p->map(c.store, {.page_bytes = page}));
				c.read.push_back(seconds_of([&] {
					for (std::uint64_t at = 0; at < bytes; at += page)
						(void)*const_cast<volatile std::byte *>(m->memory().data() +
											at);
				}));
				c.moved = static_cast<double>(c.store->stats().bytes_read - before);
			}
		for (const coded &c : all)
			std::printf("{\"figure\": \"coding\", \"data\": \"%s\", \"code\": \"%s\", "
				    "\"read_s\": %.4f, \"write_s\": %.4f, \"bytes\": %.0f, "
				    "\"speed_of_raw\": %.3f, \"write_speed_of_raw\": %.3f, "
				    "\"traffic_of_raw\": %.3f, \"part_of_link\": %.3f}\n",
				    d.name, c.name, median(c.read), median(c.write), c.moved,
				    median_ratio(all[0].read, c.read), median_ratio(all[0].write, c.write),
				    c.moved / all[0].moved, c.moved / median(c.read) / rate);
	}
}

/* STREAM's triad with all three arrays far away, and its check. */
void stream()
{
	constexpr std::size_t count = 2 << 20; /* doubles each */
	constexpr std::uint64_t bytes = 3 * count * 8;
	constexpr double rate = 400e6;
	constexpr std::size_t page = 65536;
	remote_region r(bytes, rate, std::chrono::microseconds(10), page);
	const auto s = r.open();
	const auto p = must(pager::make({.buffer_bytes = bytes / 3}));
	const auto m = must(p->map(s, {.page_bytes = page}));
	double *const a = reinterpret_cast<double *>(m->memory().data()), *const b = a + count,
		      *const c = b + count;
	constexpr int rounds = 3;

	for (std::size_t i = 0; i < count; i++) {
		a[i] = 1;
		b[i] = 2;
		c[i] = 0;
	}
	must(m->flush());
	const network_statistics before = s->stats();
	const double took = seconds_of([&] {
		for (int n = 0; n < rounds; n++) {
			for (std::size_t i = 0; i < count; i++)
				a[i] = b[i] + 3 * c[i];
			for (std::size_t i = 0; i < count; i++)
				c[i] = a[i];
		}
		must(m->flush());
	});
	double x = 1, z = 0;
	for (int n = 0; n < rounds; n++) {
		x = 2 + 3 * z;
		z = x;
	}
	for (std::size_t i = 0; i < count; i++)
		if (a[i] != x || b[i] != 2 || c[i] != z)
			die("stream: a wrong value");
	const network_statistics after = s->stats();
	std::printf("{\"figure\": \"stream\", \"read_bytes_per_s\": %.0f, \"write_bytes_per_s\": %.0f, "
		    "\"link_bytes_per_s\": %.0f, "
		    "\"seconds\": %.3f, \"valid\": true}\n",
		    static_cast<double>(after.bytes_read - before.bytes_read) / took,
		    static_cast<double>(after.bytes_written - before.bytes_written) / took, rate, took);
}

void buffer_sizes()
{
	constexpr std::uint64_t pages = 4096;
	remote_region r(pages * 4096);
	for (std::uint64_t buffer = 1; buffer <= pages; buffer *= 4) {
		const auto s = r.open();
		const auto p = must(pager::make({.buffer_bytes = buffer * 4096}));
		auto m = must(p->map(s));
		std::minstd_rand random(3);
		std::uint64_t *const w = reinterpret_cast<std::uint64_t *>(m->memory().data());
		constexpr int touches = 20000;
		const double took = seconds_of([&] {
			for (int i = 0; i < touches; i++)
				w[random() % pages * 512]++;
		});
		std::printf("{\"figure\": \"buffer\", \"buffer_pages\": %llu, \"of_pages\": %llu, "
			    "\"touches_per_s\": %.0f}\n",
			    static_cast<unsigned long long>(buffer), static_cast<unsigned long long>(pages),
			    touches / took);
		must(m->unmap());
	}
}

void unmap()
{
	const auto p = must(pager::make());
	const auto from = memory_store(1 << 20);
	const auto count = [](const char *path) {
		std::ifstream f(path);
		std::string line;
		int n = 0;
		while (std::getline(f, line))
			n++;
		return n;
	};
	const auto once = [&] {
		const auto m = must(p->map(from));
		m->memory()[0] = std::byte{1};
	};
	const auto next = [] {
		const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
		::close(fd);
		return fd;
	};
	for (int i = 0; i < 100; i++)
		once();
	const int fd = next(), maps = count("/proc/self/maps");
	const double took = seconds_of([&] {
		for (int i = 0; i < 10000; i++)
			once();
	});
	std::printf("{\"figure\": \"unmap\", \"times\": 10000, \"us_each\": %.1f, \"more_descriptors\": %d, "
		    "\"more_mappings\": %d}\n",
		    took / 10000 * 1e6, next() - fd, count("/proc/self/maps") - maps);
}

} // namespace

int main(int argc, char **argv)
{
	struct figure {
		const char *name;
		void (*run)();
		bool over_verbs = false;
	};
	constexpr figure figures[] = {{"latency", latency},           {"fill", fill, true},
				      {"steps", steps, true},         {"workers", workers},
				      {"coding", coding_gain},        {"stream", stream},
				      {"buffer", buffer_sizes, true}, {"unmap", unmap}};
	std::vector<const figure *> chosen;

	for (int i = 1; i < argc; i++) {
		if (std::string(argv[i]) == "--file" && i + 1 < argc) {
			file_path = argv[++i];
			continue;
		}
		if (std::string(argv[i]) == "--doubles" && i + 1 < argc) {
			doubles_path = argv[++i];
			continue;
		}
		if (std::string(argv[i]) == "--verbs" && i + 1 < argc) {
			const std::string both = argv[++i];
			const std::size_t comma = both.find(',');
			server_device = both.substr(0, comma);
			client_device = comma == std::string::npos ? server_device : both.substr(comma + 1);
			if (server_device.empty() || client_device.empty())
				die("--verbs " + both + ": two names of devices, with a comma between");
			continue;
		}
		const auto f = std::find_if(std::begin(figures), std::end(figures),
					    [&](const figure &x) { return std::string(x.name) == argv[i]; });
		if (f == std::end(figures))
			die(std::string(
				"usage: far_bench [latency|fill|steps|workers|coding|stream|buffer|unmap]... "
				"[--file PATH] [--doubles PATH] [--verbs SERVER,CLIENT]; not ") +
			    argv[i]);
		chosen.push_back(f);
	}
	if (chosen.empty())
		for (const figure &f : figures)
			if (server_device.empty() || f.over_verbs)
				chosen.push_back(&f);
	for (const figure *f : chosen)
		if (!server_device.empty() && !f->over_verbs)
			die(std::string(f->name) + ": only fill, steps and buffer are measured over verbs");
	for (const figure *f : chosen) {
		f->run();
		std::fflush(stdout);
	}
	return 0;
}
