/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Regions of a server: by shared memory, or by verbs between NPRDMA_TEST_VERBS=SERVER_DEVICE,CLIENT_DEVICE.
 */
#include "guarded.hpp"
#include "must.hpp"

#include <nprdma/far_network.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <future>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{

using namespace nprdma::far;
using namespace std::chrono_literals;
namespace transport = nprdma::transport;

const char *devices()
{
	return std::getenv("NPRDMA_TEST_VERBS");
}

std::unique_ptr<transport::context> context_of(bool server)
{
	transport::options o;

	if (!devices())
		return must(transport::open("shm", o));
	const std::string all = devices();
	const std::size_t comma = all.find(',');
	o.device = server || comma == std::string::npos ? all.substr(0, comma) : all.substr(comma + 1);
	return must(transport::open("verbs", o));
}

class Network : public testing::Test
{
protected:
	void SetUp() override
	{
		static int number;

		guarded::install();
		address_ = devices()
			       ? "verbs:127.0.0.1:" + std::to_string(7400 + number++)
			       : "shm:far-" + std::to_string(::getpid()) + "-" + std::to_string(number++);
		there_ = context_of(true);
		here_ = context_of(false);
		pager_ = must(pager::make(small()));
		serve();
		if (devices()) {
			const auto begin = std::chrono::steady_clock::now();

			must(server_->lend("probe", 4096));
			(void)open({}, "probe");
			slowest_ = std::max(slowest_, std::chrono::ceil<std::chrono::milliseconds>(
							  std::chrono::steady_clock::now() - begin));
		}
	}

	static pager_options small()
	{
		pager_options o;

		o.buffer_bytes = 64 * 4096;
		return o;
	}

	void serve(const server_options &how = {}) { server_ = must(server::make(*there_, address_, how)); }

	/*
	 * What is to succeed has time: an emulated adapter on a busy machine needs seconds. What is to fail
	 * has many times what a connection has taken here.
	 */
	static network_options patient(network_options how = {})
	{
		how.deadline = devices() ? 60s : 5s;
		return how;
	}
	static network_options hasty(std::chrono::milliseconds natively, network_options how = {})
	{
		how.deadline =
		    devices() ? std::clamp<std::chrono::milliseconds>(10 * slowest_, 3s, 40s) : natively;
		return how;
	}

	result<std::shared_ptr<network_store>> try_open(const network_options &how = {},
							const std::string &name = "r")
	{
		return network_store::open(*here_, address_, name, patient(how));
	}
	std::shared_ptr<network_store> open(const network_options &how = {}, const std::string &name = "r")
	{
		return must(try_open(how, name));
	}
	/* The lanes of the last client are closed, which the server sees soon. */
	std::shared_ptr<network_store> open_next(const network_options &how = {})
	{
		for (;;) {
			auto s = try_open(how);

			if (s)
				return *s;
			if (s.code() != EBUSY)
				throw std::runtime_error(s.why().text);
		}
	}

	static std::uint64_t *words(const mapping &m)
	{
		return reinterpret_cast<std::uint64_t *>(m.memory().data());
	}

	/* @f has no destructors to run. That a page of @m cannot be brought is a failure with a reason. */
	template <class F> static void touch(const mapping &m, F f)
	{
		if (const int signal = guarded::signal_of(f))
			throw std::runtime_error("signal " + std::to_string(signal) + ": " +
						 m.last_error().text);
	}
	/* The first word of a page. */
	static std::uint64_t get(const mapping &m, std::size_t page)
	{
		const volatile std::uint64_t *const at = words(m) + page * 512;
		volatile std::uint64_t value = 0;

		touch(m, [at, &value] { value = *at; });
		return value;
	}
	static void set(const mapping &m, std::size_t page, std::uint64_t value)
	{
		volatile std::uint64_t *const at = words(m) + page * 512;

		touch(m, [at, value] { *at = value; });
	}

	std::string address_;
	std::unique_ptr<transport::context> there_, here_;
	std::unique_ptr<server> server_;
	std::unique_ptr<pager> pager_;
	static inline std::chrono::milliseconds slowest_{0}; /* to connect and open a region */
};

TEST_F(Network, WrongRequestsAreRefused)
{
	EXPECT_EQ(try_open({}, "nobody").code(), ENOENT);
	network_options make;
	make.make_bytes = 1 << 20;
	EXPECT_EQ(try_open(make, "mine").code(), EDQUOT);
	make.lanes = 0;
	EXPECT_EQ(try_open(make, "mine").code(), EINVAL);
	make = {};
	make.code = coding::zfp_64;
	EXPECT_EQ(try_open(make, "mine").code(), EINVAL);
	EXPECT_EQ(server_->lend("r", 1 << 20, 5000).code(), EINVAL);
	EXPECT_EQ(server_->lend(std::string(96, 'x'), 1 << 20).code(), EINVAL);
	must(server_->lend("r", 1 << 20));
	EXPECT_EQ(server_->lend("r", 1 << 20).code(), EEXIST);
	{
		const auto s = open();
		EXPECT_EQ(server_->withdraw("r").code(), EBUSY);
		std::vector<std::byte> x(4096);
		EXPECT_EQ(s->read({100, x}).code(), EINVAL);
		EXPECT_EQ(s->read({1 << 20, x}).code(), EINVAL);
	}
	while (server_->withdraw("r").code() == EBUSY)
		std::this_thread::yield();
	EXPECT_EQ(try_open().code(), ENOENT);
}

class Codings : public Network, public testing::WithParamInterface<coding>
{
};

/* Data of all kinds at once, pages of several sizes, and a last page that is less than whole. */
TEST_P(Codings, WhatIsWrittenIsReadByTheNextClient)
{
	constexpr std::size_t size = 500 * 4096 + 1234, count = size / 8;
	must(server_->lend("r", size));
	network_options how;
	how.code = GetParam();
	how.error_bound = 1e-6;
	const auto value = [](std::size_t i) -> double {
		switch (i / 512 % 4) {
		case 0:
			return std::sin(static_cast<double>(i) * 1e-3);
		case 1:
			return static_cast<double>((i * 0x9e3779b97f4a7c15ULL) >> 11);
		case 2:
			return i % 100 ? 1.0 : std::nan("");
		default:
			return 0;
		}
	};
	for (const std::size_t page : {std::size_t{4096}, std::size_t{65536}}) {
		map_options map;
		map.page_bytes = page;
		{
			const auto s = open(how);
			const auto m = must(pager_->map(s, map));
			double *const d = reinterpret_cast<double *>(m->memory().data());

			touch(*m, [&] {
				for (std::size_t i = 0; i < count; i++)
					if (i / 512 % 5)
						d[i] = value(i) + static_cast<double>(page);
			});
			must(m->unmap());
			if (how.code != coding::raw) {
				EXPECT_GT(s->stats().pages_coded, 100u);
			}
			EXPECT_GT(s->stats().pages_raw, 0u);
		}
		how.read_only = true;
		const std::shared_ptr<network_store> s = open_next(how);
		map.read_only = true;
		const auto m = must(pager_->map(s, map));
		const double *const d = reinterpret_cast<const double *>(m->memory().data());
		std::size_t wrong = 0, first = count;
		touch(*m, [&] {
			for (std::size_t i = 0; i < count; i++) {
				const double want = i / 512 % 5 ? value(i) + static_cast<double>(page) : 0;
				const double is = d[i];
				const bool good = std::isnan(want)             ? std::isnan(is)
						  : how.code == coding::zfp_64 ? std::abs(is - want) <= 1e-6
									       : is == want;
				if (!good) {
					wrong++;
					first = std::min(first, i);
				}
			}
		});
		EXPECT_EQ(wrong, 0u) << "the first one is " << first << ", of " << page << " bytes a page";
		EXPECT_EQ(s->stats().checksum_errors, 0u);
		how.read_only = false;
	}
}

INSTANTIATE_TEST_SUITE_P(Far, Codings,
			 testing::Values(coding::raw, coding::lz4, coding::zfp_64, coding::zfp_32),
			 [](const auto &p) {
				 return p.param == coding::raw      ? "raw"
					: p.param == coding::lz4    ? "lz4"
					: p.param == coding::zfp_64 ? "zfp64"
								    : "zfp32";
			 });

/* Also where a page that was only read counts as written, as on kernels without CONFIG_PTE_MARKER_UFFD_WP. */
class Protection : public Network, public testing::WithParamInterface<bool>
{
};
INSTANTIATE_TEST_SUITE_P(Far, Protection, testing::Bool(),
			 [](const auto &p) { return p.param ? "protected" : "unprotected"; });

TEST_P(Protection, WhatWasNeverWrittenIsNotTransferred)
{
	pager_options o = small();
	o.write_protection = GetParam();
	pager_ = must(pager::make(o));
	if (GetParam())
		std::printf("# write protection of shared memory: %s\n",
			    pager_->write_protection()
				? "yes"
				: "not in this kernel, what is mapped counts as written");
	else
		EXPECT_FALSE(pager_->write_protection());
	must(server_->lend("r", 1 << 20));
	const auto s = open();
	const auto m = must(pager_->map(s));

	for (std::size_t i = 0; i < 256; i++)
		ASSERT_EQ(get(*m, i), 0u);
	EXPECT_GE(m->stats().empty, 256u);
	EXPECT_EQ(m->stats().empty, m->stats().demand + m->stats().prefetched);
	must(m->evict());
	EXPECT_EQ(s->stats().bytes_read, 0u);
	EXPECT_EQ(s->stats().bytes_written, 0u);
	set(*m, 1, 1);
	must(m->evict());
	EXPECT_EQ(s->stats().bytes_written, 4096u);
	EXPECT_EQ(get(*m, 1), 1u);
	EXPECT_EQ(s->stats().bytes_read, 4096u);
	must(m->discard(4096, 4096));
	EXPECT_EQ(get(*m, 1), 0u);
	EXPECT_EQ(s->stats().bytes_read, 4096u);
}

TEST_F(Network, OneClientWritesOrManyAgreeToShare)
{
	must(server_->lend("r", 1 << 20));
	{
		const auto s = open();
		network_options how;

		EXPECT_EQ(try_open().code(), EBUSY);
		how.read_only = true;
		EXPECT_EQ(try_open(how).code(), EBUSY);
	}
	network_options how;
	how.shared = true;
	const std::shared_ptr<network_store> s[2] = {open_next(how), open_next(how)};
	const auto a = must(pager_->map(s[0])), b = must(pager_->map(s[1]));
	set(*a, 0, 5);
	set(*b, 1, 6);
	must(a->flush());
	must(b->flush());
	EXPECT_EQ(get(*b, 0), 5u);
	EXPECT_EQ(get(*a, 1), 6u);
}

TEST_F(Network, MemoryOfTheServersOwnerIsLentAsItIs)
{
	constexpr std::size_t size = 3 * 4096 + 808; /* and more behind it, which is nobody's business */
	std::vector<std::uint64_t> memory(8192 / 8 * 2 + 8, 1);
	const auto lent = std::as_writable_bytes(std::span(memory)).first(size);
	network_options how;
	network_statistics counts;

	how.code = coding::lz4;
	must(server_->lend("r", lent));
	EXPECT_EQ(server_->lend("r", lent).code(), EEXIST);
	how.shared = true;
	{
		const std::shared_ptr<network_store> s[2] = {open_next(how), open_next(how)};
		const auto a = must(pager_->map(s[0])), b = must(pager_->map(s[1]));

		EXPECT_EQ(a->memory().size(), size);
		set(*a, 0, 5);
		set(*b, 3, 6);
		memory[512] = 7;
		EXPECT_EQ(get(*a, 1), 7u);
		must(a->flush());
		must(b->flush());
		counts = s[0]->stats();
		EXPECT_EQ(server_->withdraw("r").code(), EBUSY);
	}
	EXPECT_EQ(memory[0], 5u);
	EXPECT_EQ(memory[1], 1u);
	EXPECT_EQ(memory[3 * 512], 6u);
	EXPECT_EQ(memory[size / 8], 1u);
	EXPECT_EQ(counts.pages_coded, 0u);
	must(server_->withdraw_after("r", 2));
	EXPECT_EQ(server_->withdraw_after("r", 2).code(), ENOENT);
	EXPECT_EQ(server_->withdraw_after("r", 65537).code(), EINVAL);
}

TEST_F(Network, ManyClientsHaveRegionsOfTheirOwn)
{
	server_options allow;
	allow.clients_may_make = 16 << 20;
	server_.reset();
	serve(allow);
	std::vector<std::future<int>> wrong;

	for (unsigned i = 0; i < 4; i++)
		wrong.push_back(std::async(std::launch::async, [&, i] {
			network_options how;
			how.make_bytes = 1 << 20;
			how.code = i % 2 ? coding::lz4 : coding::raw;
			const auto m = must(pager_->map(open(how, "of-" + std::to_string(i))));
			int n = 0;

			for (std::size_t page = 0; page < 256; page++)
				set(*m, page, page * 10 + i);
			for (std::size_t page = 0; page < 256; page++)
				n += get(*m, page) != page * 10 + i;
			return n;
		}));
	for (auto &n : wrong)
		EXPECT_EQ(n.get(), 0);
}

TEST_F(Network, AServerThatIsGoneIsASignalWithinTheDeadlineAndNoZeros)
{
	must(server_->lend("r", 1 << 20));
	const network_options how = hasty(300ms);
	const auto m = must(pager_->map(must(network_store::open(*here_, address_, "r", how))));
	must(m->advise(0, 1 << 20, hint::random));
	for (std::size_t i = 0; i < 256; i++)
		set(*m, i, i + 1);
	must(m->evict());
	set(*m, 0, 77);
	server_.reset();
	const auto begin = std::chrono::steady_clock::now();
	for (std::size_t i = 1; i < 4; i++)
		EXPECT_EQ(guarded::signal_of(
			      [&] { (void)*const_cast<volatile std::uint64_t *>(&words(*m)[i * 512]); }),
			  SIGBUS);
	EXPECT_LT(std::chrono::steady_clock::now() - begin, 6 * how.deadline + 2s);
	EXPECT_FALSE(m->flush());
	/* Another server of that name has lost what the first one had. */
	serve();
	must(server_->lend("r", 1 << 20));
	m->retry();
	EXPECT_EQ(guarded::signal_of([&] { (void)*const_cast<volatile std::uint64_t *>(&words(*m)[512]); }),
		  SIGBUS);
	EXPECT_EQ(m->flush().code(), ESTALE);
	EXPECT_EQ(get(*m, 0), 77u);
}

TEST_F(Network, AServerOverAFileMayBeStartedAnew)
{
	const std::string path = testing::TempDir() + "far-region-" + std::to_string(::getpid());
	must(server_->lend("r", 1 << 20, 4096, path));
	const auto s = open();
	const auto m = must(pager_->map(s));
	for (std::size_t i = 0; i < 256; i++)
		set(*m, i, i + 1);
	must(m->flush());
	must(m->evict());
	server_.reset();
	auto later = std::async(std::launch::async, [&] {
		std::this_thread::sleep_for(100ms);
		serve();
		must(server_->lend("r", 1 << 20, 4096, path));
	});
	/* Nobody notices but by the time that it takes. */
	for (std::size_t i = 0; i < 256; i++)
		ASSERT_EQ(get(*m, i), i + 1);
	later.get();
	EXPECT_GT(s->stats().reconnects, 0u);
	::unlink(path.c_str());
}

TEST_F(Network, ADamagedPageIsASignal)
{
	for (const coding code : {coding::raw, coding::lz4}) {
		const std::string path = testing::TempDir() + "far-damage-" + std::to_string(::getpid());
		const std::string name = code == coding::raw ? "a" : "b";
		must(server_->lend(name, 16 * 4096, 4096, path));
		network_options how;
		how.code = code;
		const auto s = open(how, name);
		const auto m = must(pager_->map(s));
		touch(*m, [&] {
			for (std::size_t i = 0; i < 16 * 512; i++)
				words(*m)[i] = i / 64;
		});
		must(m->evict());
		/* One bit of one page, at the server. */
		const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
		char byte;
		ASSERT_EQ(::pread(fd, &byte, 1, 5 * 4096 + 10), 1);
		byte = static_cast<char>(byte ^ 4);
		ASSERT_EQ(::pwrite(fd, &byte, 1, 5 * 4096 + 10), 1);
		::close(fd);
		EXPECT_EQ(guarded::signal_of(
			      [&] { (void)*const_cast<volatile std::uint64_t *>(&words(*m)[5 * 512]); }),
			  SIGBUS);
		EXPECT_EQ(get(*m, 6), 6u * 512 / 64);
		EXPECT_GE(s->stats().checksum_errors, 1u);
		::unlink(path.c_str());
	}
}

TEST_F(Network, OneOfTwoServersMayDie)
{
	must(server_->lend("r", 1 << 20));
	const auto second_context = context_of(true);
	const std::string other = devices() ? "verbs:127.0.0.1:7399" : address_ + "-second";
	const auto second = must(server::make(*second_context, other));
	must(second->lend("r", 1 << 20));
	const network_options how = hasty(200ms);
	const auto both = must(mirror_store({must(network_store::open(*here_, address_, "r", how)),
					     must(network_store::open(*here_, other, "r", patient()))}));
	const auto m = must(pager_->map(both));
	for (std::size_t i = 0; i < 256; i++)
		set(*m, i, i + 1);
	must(m->evict());
	server_.reset();
	const auto begin = std::chrono::steady_clock::now();
	for (std::size_t i = 0; i < 256; i += 50)
		ASSERT_EQ(get(*m, i), i + 1);
	/* One that does not answer is not asked again and again: here by a filler for each fault under way.
	 */
	EXPECT_LT(std::chrono::steady_clock::now() - begin, 4 * how.deadline + 2s);
	for (std::size_t i = 0; i < 256; i += 50)
		set(*m, i, i + 100);
	must(m->flush());
	must(m->evict());
	for (std::size_t i = 0; i < 256; i += 50)
		ASSERT_EQ(get(*m, i), i + 100);
}

/* In a process of its own, and not at its own will. */
TEST(Process, AServerThatIsKilledIsASignal)
{
	if (devices())
		GTEST_SKIP() << "verbs do not survive a fork";
	const std::string address = "shm:far-kill-" + std::to_string(::getpid());
	int ready[2];
	ASSERT_EQ(::pipe(ready), 0);
	const pid_t child = ::fork();
	if (child == 0) {
		const auto c = context_of(true);
		const auto s = must(server::make(*c, address));
		must(s->lend("r", 1 << 20));
		if (::write(ready[1], "x", 1) != 1)
			::_exit(1);
		for (;;)
			::pause();
	}
	char x;
	ASSERT_EQ(::read(ready[0], &x, 1), 1);
	const auto c = context_of(false);
	pager_options small;
	small.buffer_bytes = 1;
	const auto p = must(pager::make(small));
	network_options how;
	how.deadline = 300ms;
	const auto m = must(p->map(must(network_store::open(*c, address, "r", how))));
	std::uint64_t *const w = reinterpret_cast<std::uint64_t *>(m->memory().data());
	for (std::size_t i = 0; i < 256; i++)
		w[i * 512] = i;
	for (std::size_t i = 0; i < 256; i++)
		ASSERT_EQ(w[i * 512], i);
	must(m->flush());
	::kill(child, SIGKILL);
	ASSERT_EQ(::waitpid(child, nullptr, 0), child);
	must(m->evict());
	EXPECT_EQ(guarded::signal_of([&] { (void)*const_cast<volatile std::uint64_t *>(&w[512]); }), SIGBUS);
	::close(ready[0]);
	::close(ready[1]);
}

} // namespace
