/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a transport promises, for each of them. Shared memory is always there; verbs needs the environment
 * variable NPRDMA_TEST_VERBS=DEVICE[,DEVICE], which guests set.
 */
#include "must.hpp"
#include "no_descriptors.hpp"
#include "tcp.hpp"

#include <nprdma/transport.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <future>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace
{
std::atomic<bool> stop_before_copy = false;
} // namespace

/* The program's own, as that of no_descriptors.hpp. */
extern "C" __attribute__((visibility("default"))) ssize_t
process_vm_writev(pid_t pid, const iovec *local, unsigned long n, const iovec *remote, unsigned long m,
		  unsigned long flags) noexcept
{
	if (stop_before_copy)
		::raise(SIGSTOP);
	return ::syscall(SYS_process_vm_writev, pid, local, n, remote, m, flags);
}

extern "C" __attribute__((visibility("default"))) ssize_t
process_vm_readv(pid_t pid, const iovec *local, unsigned long n, const iovec *remote, unsigned long m,
		 unsigned long flags) noexcept
{
	if (stop_before_copy)
		::raise(SIGSTOP);
	return ::syscall(SYS_process_vm_readv, pid, local, n, remote, m, flags);
}

namespace
{

using namespace nprdma::transport;
using namespace std::chrono_literals;

struct shm {
	static bool there() { return true; }
	static options how(int) { return {}; }
	static std::string address() { return "shm:test-" + std::to_string(::getpid()); }
};

struct verbs {
	static const char *devices() { return std::getenv("NPRDMA_TEST_VERBS"); }
	static bool there() { return devices() != nullptr; }
	static options how(int end)
	{
		options o;
		const std::string all = devices();
		const std::size_t comma = all.find(',');

		o.device =
		    end == 0 || comma == std::string::npos ? all.substr(0, comma) : all.substr(comma + 1);
		return o;
	}
	static std::string address() { return "verbs:127.0.0.1:0"; }
};

std::span<const std::byte> bytes_of(std::string_view text)
{
	return std::as_bytes(std::span(text.data(), text.size()));
}

std::string text_of(std::span<const std::byte> bytes)
{
	return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

/* An emulated adapter on a busy machine needs seconds to connect. */
auto soon()
{
	return nprdma::transport::clock::now() + (verbs::there() ? 60s : 10s);
}

template <class Kind> class Transport : public testing::Test
{
protected:
	static constexpr std::size_t size = 1 << 20;

	void SetUp() override
	{
		if (!Kind::there())
			GTEST_SKIP() << "NPRDMA_TEST_VERBS names no device";
		make(Kind::how(0), Kind::how(1));
	}

	void make(const options &first, const options &second)
	{
		close();
		here_ = must(open(Kind::address(), first));
		there_ = must(open(Kind::address(), second));
		here_memory_.assign(size, std::byte{0});
		there_memory_.assign(size, std::byte{0});
		here_region_ = must(here_->register_memory(here_memory_));
		there_region_ = must(there_->register_memory(there_memory_));
		listener_ = must(there_->listen(Kind::address()));
		std::tie(to_there_, to_here_) = pair();
	}

	void close()
	{
		to_there_.reset();
		to_here_.reset();
		here_region_.reset();
		there_region_.reset();
		listener_.reset();
		here_.reset();
		there_.reset();
	}

	std::pair<std::unique_ptr<connection>, std::unique_ptr<connection>> pair()
	{
		auto accepted =
		    std::async(std::launch::async, [&] { return must(listener_->accept(soon())); });
		std::unique_ptr<connection> connected = must(here_->connect(listener_->address(), soon()));

		return {std::move(connected), accepted.get()};
	}

	segment at(std::size_t here, std::size_t there, std::size_t bytes)
	{
		return {here_region_.get(), here_memory_.data() + here, there_region_->remote().addr + there,
			there_region_->remote().key, static_cast<std::uint32_t>(bytes)};
	}

	void fill(std::vector<std::byte> &memory, unsigned seed) const
	{
		for (std::size_t i = 0; i < memory.size(); i++)
			memory[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 7);
	}

	completion completed(connection &c) { return must(next_completion(c, soon())); }

	std::string message(connection &c)
	{
		std::vector<std::byte> buffer(c.max_message());

		return text_of(must(next_message(c, buffer, soon())));
	}

	std::unique_ptr<context> here_, there_;
	std::vector<std::byte> here_memory_, there_memory_;
	std::unique_ptr<region> here_region_, there_region_;
	std::unique_ptr<listener> listener_;
	std::unique_ptr<connection> to_there_, to_here_;
};

using kinds = testing::Types<shm, verbs>;
class KindName
{
public:
	template <class T> static std::string GetName(int)
	{
		return std::is_same_v<T, shm> ? "shm" : "verbs";
	}
};
TYPED_TEST_SUITE(Transport, kinds, KindName);

TEST(Options, MoreThanAPeerMayAskForIsRefused)
{
	options o;

	o.messages = 1 << 16;
	o.max_message = 2048;
	EXPECT_EQ(open("shm", o).code(), EINVAL);
}

TYPED_TEST(Transport, ConnectToNobodyIsRefused)
{
	const std::string nobody =
	    std::is_same_v<TypeParam, shm> ? "shm:nobody-listens-here" : "verbs:127.0.0.1:1";

	EXPECT_EQ(this->here_->connect(nobody, soon()).code(), ECONNREFUSED);
}

/* Who listens says how much room peers may have, or its options do. */
TYPED_TEST(Transport, MoreRoomThanTheListenerGivesIsRefusedAndTheNextIsServed)
{
	for (const message_room &wrong :
	     {message_room{65, 4096}, message_room{64, 4097}, message_room{2, 1 << 20}}) {
		auto refused =
		    std::async(std::launch::async, [&] { return this->listener_->accept(soon()).code(); });
		const auto c = this->here_->connect(this->listener_->address(), soon(), wrong);

		EXPECT_EQ(c.code(), ENOBUFS);
		EXPECT_NE(c.why().text.find("64 of 4096 bytes"), std::string::npos) << c.why().text;
		EXPECT_EQ(refused.get(), ENOBUFS);
	}
	EXPECT_EQ(this->here_->connect(this->listener_->address(), soon(), message_room{1, 8}).code(),
		  EINVAL);
	auto accepted = std::async(std::launch::async, [&] { return must(this->listener_->accept(soon())); });
	const auto small =
	    must(this->here_->connect(this->listener_->address(), soon(), message_room{2, 100}));
	const auto peer = accepted.get();
	EXPECT_EQ(small->max_message(), 100u);
	EXPECT_EQ(peer->max_message(), 100u);
	auto both = this->pair();
	EXPECT_EQ(both.first->max_message(), 4096u);
}

TYPED_TEST(Transport, SegmentsOutsideOfTheLocalRegionAreRefused)
{
	const segment good = this->at(0, 0, 64);
	segment wrong = good;

	EXPECT_EQ(this->to_there_->read({}, 1).code(), EINVAL);
	wrong.bytes = 0;
	EXPECT_EQ(this->to_there_->read({&wrong, 1}, 1).code(), EINVAL);
	wrong = this->at(TestFixture::size - 63, 0, 64);
	EXPECT_EQ(this->to_there_->read({&wrong, 1}, 1).code(), EINVAL);
	wrong = good;
	wrong.buffer = this->here_memory_.data() - 1;
	EXPECT_EQ(this->to_there_->write({&wrong, 1}, 1).code(), EINVAL);
	const std::vector<segment> many(this->to_there_->max_segments() + 1, good);
	EXPECT_EQ(this->to_there_->read(many, 1).code(), EINVAL);
	/* And none of that broke it. */
	must(this->to_there_->read({&good, 1}, 7));
	EXPECT_EQ(this->completed(*this->to_there_).id, 7u);
}

TYPED_TEST(Transport, AccessOutsideOfTheRemoteRegionBreaksTheConnection)
{
	const segment s = this->at(0, TestFixture::size - 63, 64);

	must(this->to_there_->read({&s, 1}, 5));
	const completion c = this->completed(*this->to_there_);
	EXPECT_EQ(c.id, 5u);
	EXPECT_NE(c.error, 0);
	EXPECT_FALSE(this->to_there_->alive());
	const segment good = this->at(0, 0, 64);
	EXPECT_EQ(this->to_there_->read({&good, 1}, 6).code(), ECONNRESET);
	EXPECT_EQ(this->to_there_->send(bytes_of("x")).code(), ECONNRESET);
}

TYPED_TEST(Transport, RightsOfARegionAreKept)
{
	region_options read_only;
	read_only.remote_write = false;
	const auto region = must(this->there_->register_memory(this->there_memory_, read_only));
	segment s = this->at(0, 0, 64);

	s.key = region->remote().key;
	must(this->to_there_->read({&s, 1}, 1));
	EXPECT_EQ(this->completed(*this->to_there_).error, 0);
	must(this->to_there_->write({&s, 1}, 2));
	EXPECT_NE(this->completed(*this->to_there_).error, 0);
}

TYPED_TEST(Transport, AKeyEndsWithItsRegion)
{
	segment s = this->at(0, 0, 64);

	this->there_region_.reset();
	must(this->to_there_->read({&s, 1}, 1));
	EXPECT_NE(this->completed(*this->to_there_).error, 0);
}

TYPED_TEST(Transport, ReadBringsAndWriteTakesListsOfSegments)
{
	this->fill(this->here_memory_, 1);
	this->fill(this->there_memory_, 2);
	const std::vector<std::byte> here = this->here_memory_, there = this->there_memory_;
	const segment in[] = {this->at(0, 100, 50), this->at(4096, 70000, 8192), this->at(200000, 1, 1)};

	must(this->to_there_->read(in, 1));
	EXPECT_EQ(this->completed(*this->to_there_).error, 0);
	for (const segment &s : in) {
		const std::byte *const from = there.data() + (s.remote - this->there_region_->remote().addr);
		EXPECT_EQ(std::memcmp(s.buffer, from, s.bytes), 0);
	}
	EXPECT_EQ(this->here_memory_[50], here[50]);
	EXPECT_EQ(this->here_memory_[200001], here[200001]);

	const segment out[] = {this->at(300000, 300000, 100000), this->at(0, 500000, 3)};
	must(this->to_there_->write(out, 2));
	EXPECT_EQ(this->completed(*this->to_there_).error, 0);
	for (const segment &s : out) {
		const std::byte *const to =
		    this->there_memory_.data() + (s.remote - this->there_region_->remote().addr);
		EXPECT_EQ(std::memcmp(s.buffer, to, s.bytes), 0);
	}
	EXPECT_EQ(this->there_memory_[400000], there[400000]);
}

TYPED_TEST(Transport, CompletionsComeInTheOrderOfPosts)
{
	std::uint64_t posted = 0, done = 0;

	while (done < 1000) {
		while (posted < 1000) {
			/* What is under way at once does not overlap. */
			const segment s = this->at(posted % 256 * 4096, posted % 256 * 4096, 4096);
			const status r = posted % 2 ? this->to_there_->read({&s, 1}, posted)
						    : this->to_there_->write({&s, 1}, posted);
			if (r.code() == EAGAIN)
				break;
			must(r);
			posted++;
		}
		const completion c = this->completed(*this->to_there_);
		ASSERT_EQ(c.error, 0);
		ASSERT_EQ(c.id, done++);
	}
	completion none;
	EXPECT_EQ(this->to_there_->poll({&none, 1}), 0u);
}

TYPED_TEST(Transport, TooMuchUnderWaySaysTryAgain)
{
	const segment s = this->at(0, 0, 4096);
	std::size_t n = 0;

	/* Nobody polls: nothing ends. */
	for (; n <= this->to_there_->max_operations(); n++)
		if (const status r = this->to_there_->read({&s, 1}, n); !r) {
			EXPECT_EQ(r.code(), EAGAIN);
			break;
		}
	EXPECT_EQ(n, this->to_there_->max_operations());
	EXPECT_EQ(this->completed(*this->to_there_).id, 0u);
	must(this->to_there_->read({&s, 1}, n));
}

TYPED_TEST(Transport, MessagesArriveInOrderBothWays)
{
	std::vector<std::byte> large(this->to_there_->max_message(), std::byte{7});

	EXPECT_EQ(this->to_there_->send({}).code(), EMSGSIZE);
	large.push_back(std::byte{7});
	EXPECT_EQ(this->to_there_->send(large).code(), EMSGSIZE);
	large.pop_back();
	must(this->to_there_->send(bytes_of("one")));
	must(this->to_there_->send(large));
	must(this->to_there_->send(bytes_of("three")));
	must(this->to_here_->send(bytes_of("back")));
	EXPECT_EQ(this->message(*this->to_here_), "one");
	std::byte small[3];
	EXPECT_EQ(next_message(*this->to_here_, small, soon()).code(), ENOBUFS);
	EXPECT_EQ(this->message(*this->to_here_), text_of(large));
	EXPECT_EQ(this->message(*this->to_here_), "three");
	EXPECT_EQ(this->message(*this->to_there_), "back");
	EXPECT_EQ(must(this->to_there_->receive(large)), 0u);
}

TYPED_TEST(Transport, ASenderThatIsFasterWaitsForTheReceiver)
{
	constexpr std::uint64_t count = 20000;
	auto receiver = std::async(std::launch::async, [&] {
		std::byte buffer[64];

		for (std::uint64_t i = 0; i < count; i++) {
			std::uint64_t got;

			const auto m = must(next_message(*this->to_here_, buffer, soon()));
			ASSERT_EQ(m.size(), sizeof(got));
			std::memcpy(&got, m.data(), sizeof(got));
			ASSERT_EQ(got, i);
		}
	});
	connection *const c[] = {this->to_there_.get()};

	for (std::uint64_t i = 0; i < count; i++) {
		status s;

		while ((s = c[0]->send(std::as_bytes(std::span(&i, 1)))).code() == EAGAIN)
			ASSERT_TRUE(must(wait(c, soon())));
		if (!s) {
			ADD_FAILURE() << s.why().text;
			break;
		}
	}
	receiver.get();
}

TYPED_TEST(Transport, AMessageBehindAWriteComesAfterTheData)
{
	constexpr unsigned rounds = 300;
	constexpr std::size_t bytes = 100'000;
	auto receiver = std::async(std::launch::async, [&] {
		for (unsigned i = 0; i < rounds; i++) {
			const std::string text = this->message(*this->to_here_);
			const std::byte *const at = this->there_memory_.data() + (i % 2) * bytes;

			ASSERT_EQ(text, std::to_string(i));
			ASSERT_TRUE(std::all_of(at, at + bytes,
						[&](std::byte b) { return b == std::byte(i & 0xff); }));
			must(this->to_here_->send(bytes_of("next")));
		}
	});

	for (unsigned i = 0; i < rounds; i++) {
		std::byte *const from = this->here_memory_.data() + (i % 2) * bytes;
		const segment s[] = {
		    this->at((i % 2) * bytes, (i % 2) * bytes, bytes / 2),
		    this->at((i % 2) * bytes + bytes / 2, (i % 2) * bytes + bytes / 2, bytes / 2)};

		std::fill(from, from + bytes, std::byte(i & 0xff));
		must(this->to_there_->write(s, i, bytes_of(std::to_string(i))));
		EXPECT_EQ(this->message(*this->to_there_), "next");
		EXPECT_EQ(this->completed(*this->to_there_).error, 0);
	}
	receiver.get();
}

TYPED_TEST(Transport, OneThreadWaitsForManyConnections)
{
	std::vector<std::unique_ptr<connection>> ours, theirs;
	std::vector<connection *> all;

	for (int i = 0; i < 20; i++) {
		auto [a, b] = this->pair();
		ours.push_back(std::move(a));
		theirs.push_back(std::move(b));
		all.push_back(theirs.back().get());
	}
	EXPECT_FALSE(must(wait(all, nprdma::transport::clock::now() + 20ms)));
	for (const std::size_t i : {3u, 19u, 0u}) {
		std::byte buffer[16];

		must(ours[i]->send(bytes_of("x")));
		std::size_t found = 0;
		while (!found) {
			ASSERT_TRUE(must(wait(all, soon())));
			for (std::size_t j = 0; j < all.size(); j++)
				if (must(all[j]->receive(buffer))) {
					EXPECT_EQ(j, i);
					found++;
				}
		}
		EXPECT_EQ(found, 1u);
	}
}

TYPED_TEST(Transport, ADescriptorEndsAWait)
{
	const int event = ::eventfd(1, EFD_CLOEXEC);
	connection *const c[] = {this->to_there_.get()};

	EXPECT_TRUE(must(wait(c, soon(), event)));
	::close(event);
}

TYPED_TEST(Transport, ShutdownWakesBothEnds)
{
	connection *const c[] = {this->to_there_.get()};
	std::thread other([&] {
		std::byte buffer[16];

		EXPECT_EQ(next_message(*this->to_here_, buffer, soon()).code(), ECONNRESET);
	});
	std::thread third([&] { this->to_there_->shutdown(); });

	while (this->to_there_->alive())
		ASSERT_TRUE(must(wait(c, soon())));
	other.join();
	third.join();
	EXPECT_FALSE(this->to_here_->alive());
}

TYPED_TEST(Transport, WhatWasSentBeforeTheEndIsReceived)
{
	std::byte buffer[16];

	must(this->to_there_->send(bytes_of("last")));
	if constexpr (std::is_same_v<TypeParam, verbs>) {
		/* An adapter drops what it has not sent when its queue pair goes: the answer says that it
		 * has. */
		EXPECT_EQ(this->message(*this->to_here_), "last");
		return;
	}
	this->to_there_.reset();
	EXPECT_EQ(this->message(*this->to_here_), "last");
	EXPECT_EQ(next_message(*this->to_here_, buffer, soon()).code(), ECONNRESET);
}

TYPED_TEST(Transport, MemoryMayBeDiscardedAndMappedInsideOfAnUnpinnedRegion)
{
	constexpr std::size_t bytes = 8 << 20, part = 1 << 20;
	void *const p = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	ASSERT_NE(p, MAP_FAILED);
	std::byte *const base = static_cast<std::byte *>(p);
	const auto region = must(this->there_->register_memory({base, bytes}));
	if (!region->unpinned()) {
		::munmap(p, bytes);
		GTEST_SKIP() << "the device cannot have unpinned regions";
	}

	ASSERT_EQ(::mprotect(base + part, part, PROT_READ | PROT_WRITE), 0);
	std::memset(base + part, 0x5a, part);
	segment s = this->at(0, 0, part);
	s.key = region->remote().key;
	s.remote = region->remote().addr + part;
	must(this->to_there_->read({&s, 1}, 1));
	ASSERT_EQ(this->completed(*this->to_there_).error, 0);
	EXPECT_EQ(this->here_memory_[part / 2], std::byte{0x5a});
	ASSERT_EQ(::madvise(base + part, part, MADV_DONTNEED), 0);
	must(this->to_there_->read({&s, 1}, 2));
	ASSERT_EQ(this->completed(*this->to_there_).error, 0);
	EXPECT_EQ(this->here_memory_[part / 2], std::byte{0});
	/* What is not mapped is an error, and not a hang. */
	s.remote = region->remote().addr;
	must(this->to_there_->read({&s, 1}, 3));
	EXPECT_NE(this->completed(*this->to_there_).error, 0);
	::munmap(p, bytes);
}

TYPED_TEST(Transport, DescriptorsAreAsBeforeAfterManyConnections)
{
	const auto next = [] {
		const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);

		::close(fd);
		return fd;
	};
	{
		auto warm = this->pair();
	}
	const int before = next();

	for (int i = 0; i < 50; i++)
		auto both = this->pair();
	EXPECT_EQ(next(), before);
}

/* Their connection waits in the backlog, and the listener looks at it from time to time. */
TYPED_TEST(Transport, WhoConnectsWaitsForADescriptorAndTheListenerDoesNotSpin)
{
	no_descriptors = true;
	auto connected = std::async(std::launch::async,
				    [&] { return this->here_->connect(this->listener_->address(), soon()); });
	const auto first = this->listener_->accept(soon());
	EXPECT_EQ(first.code(), EMFILE);
	EXPECT_NE(first.why().text.find("ulimit -n"), std::string::npos) << first.why().text;

	unsigned before = accepts;
	EXPECT_EQ(this->listener_->accept(nprdma::transport::clock::now() + 1s).code(), ETIMEDOUT);
	EXPECT_LE(accepts - before, 20u);
	/* Nor does who polls the descriptor. */
	before = accepts;
	unsigned readable = 0;
	for (const auto until = nprdma::transport::clock::now() + 1s;
	     nprdma::transport::clock::now() < until;) {
		pollfd p = {this->listener_->fd(), POLLIN, 0};

		if (::poll(&p, 1, 100) != 1)
			continue;
		readable++;
		EXPECT_EQ(this->listener_->accept(nprdma::transport::clock::now()).code(), ETIMEDOUT);
	}
	EXPECT_LE(readable, 40u);
	EXPECT_LE(accepts - before, 20u);
	EXPECT_GT(accepts - before, 0u);

	no_descriptors = false;
	EXPECT_TRUE(must(this->listener_->accept(soon()))->alive());
	(void)must(connected.get());
}

/* Is a host noticed that is gone without a word, within some 30 seconds? */
bool is_kept_alive(int fd)
{
	const auto of = [fd](int level, int name) {
		int value = -1;
		socklen_t bytes = sizeof(value);

		return ::getsockopt(fd, level, name, &value, &bytes) ? -1 : value;
	};

	return of(SOL_SOCKET, SO_KEEPALIVE) == 1 && of(IPPROTO_TCP, TCP_KEEPIDLE) == 10 &&
	       of(IPPROTO_TCP, TCP_KEEPINTVL) == 5 && of(IPPROTO_TCP, TCP_KEEPCNT) == 4;
}

TEST(Tcp, IsSetUpToNoticeAHostThatIsGone)
{
	const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ASSERT_GE(fd, 0);
	EXPECT_FALSE(is_kept_alive(fd));
	set_up_tcp(fd);
	EXPECT_TRUE(is_kept_alive(fd));
	::close(fd);
}

/* What only verbs have. */
class Verbs : public Transport<verbs>
{
protected:
	/* A TCP connection to the listener. */
	int caller()
	{
		const std::string address = listener_->address();
		sockaddr_in a{};

		a.sin_family = AF_INET;
		a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		a.sin_port =
		    htons(static_cast<std::uint16_t>(std::stoul(address.substr(address.rfind(':') + 1))));
		const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr *>(&a), sizeof(a)), 0);
		return fd;
	}
};

TEST_F(Verbs, WhoConnectsAndSaysNothingKeepsNobodyWaiting)
{
	const int silent = caller(), halfway = caller();

	ASSERT_EQ(::send(halfway, "\x6e\x27", 2, 0), 2);
	for (int i = 0; i < 2; i++) {
		auto both = pair();
		EXPECT_TRUE(both.first->alive());
	}
	/* All that is there is two who have not said enough. */
	EXPECT_EQ(listener_->accept(nprdma::transport::clock::now()).code(), ETIMEDOUT);
	::close(silent);
	::close(halfway);
}

TEST_F(Verbs, APeerOfAnotherKindIsRefused)
{
	const std::string nonsense(64, 'x');
	const int fd = caller();

	ASSERT_EQ(::send(fd, nonsense.data(), nonsense.size(), 0), static_cast<ssize_t>(nonsense.size()));
	EXPECT_EQ(listener_->accept(soon()).code(), EPROTO);
	::close(fd);
	auto both = pair();
	EXPECT_TRUE(both.first->alive());
}

TEST_F(Verbs, BothEndsNoticeAHostThatIsGone)
{
	int connected = 0;

	/* Those of the fixture's connection are all that there are. */
	for (int fd = 3; fd < 1024; fd++) {
		sockaddr_storage peer;
		socklen_t bytes = sizeof(peer);

		if (::getpeername(fd, reinterpret_cast<sockaddr *>(&peer), &bytes) ||
		    peer.ss_family != AF_INET)
			continue;
		connected++;
		EXPECT_TRUE(is_kept_alive(fd)) << fd;
	}
	EXPECT_EQ(connected, 2);
}

/* What only shared memory can show natively. */
class Shm : public Transport<shm>
{
protected:
	/* A socket that is connected to @address, or listens there. */
	static int by_hand(const std::string &address, bool listens)
	{
		sockaddr_storage a{};
		const std::string name = "nprdma-transport/" + address.substr(4);
		const int fd = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

		a.ss_family = AF_UNIX;
		std::memcpy(reinterpret_cast<char *>(&a) + 3, name.data(), name.size());
		const auto *const to = reinterpret_cast<sockaddr *>(&a);
		const auto bytes = static_cast<socklen_t>(3 + name.size());
		EXPECT_EQ(listens ? ::bind(fd, to, bytes) : ::connect(fd, to, bytes), 0);
		if (listens) {
			EXPECT_EQ(::listen(fd, 1), 0);
		}
		return fd;
	}

	/* A greeting, and the descriptors that come with it. */
	struct greeting {
		std::vector<char> text = std::vector<char>(256);
		int fds[3] = {-1, -1, -1};
		std::size_t count = 0;
	};
	static greeting received(int socket)
	{
		greeting g;
		iovec iov = {g.text.data(), g.text.size()};
		alignas(cmsghdr) char control[256]{};
		msghdr msg{};

		msg.msg_iov = &iov;
		msg.msg_iovlen = 1;
		msg.msg_control = control;
		msg.msg_controllen = sizeof(control);
		const ssize_t n = ::recvmsg(socket, &msg, 0);
		EXPECT_GT(n, 0);
		g.text.resize(static_cast<std::size_t>(std::max<ssize_t>(n, 0)));
		for (cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
			if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
				g.count = std::min<std::size_t>((c->cmsg_len - CMSG_LEN(0)) / sizeof(int), 3);
				std::memcpy(g.fds, CMSG_DATA(c), g.count * sizeof(int));
			}
		return g;
	}
	static void send(int socket, const greeting &g)
	{
		iovec iov = {const_cast<char *>(g.text.data()), g.text.size()};
		alignas(cmsghdr) char control[CMSG_SPACE(sizeof(g.fds))]{};
		msghdr msg{};

		msg.msg_iov = &iov;
		msg.msg_iovlen = 1;
		msg.msg_control = control;
		msg.msg_controllen = CMSG_SPACE(g.count * sizeof(int));
		cmsghdr *const c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(g.count * sizeof(int));
		std::memcpy(CMSG_DATA(c), g.fds, g.count * sizeof(int));
		EXPECT_EQ(::sendmsg(socket, &msg, MSG_NOSIGNAL), static_cast<ssize_t>(g.text.size()));
	}

	/* As large as @like, of a file system that knows no seals; -1: there is none. */
	static int file_like(int like)
	{
		struct stat st;

		EXPECT_EQ(::fstat(like, &st), 0);
		for (const char *where : {".", "/var/tmp", "/tmp"}) {
			const int fd = ::open(where, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

			if (fd >= 0 && ::fcntl(fd, F_GET_SEALS) < 0 && ::ftruncate(fd, st.st_size) == 0)
				return fd;
			::close(fd);
		}
		return -1;
	}
};

TEST_F(Shm, AnotherProcessReadsWritesAndDies)
{
	/* The child is made before this process has threads. */
	close();
	const std::string address = "shm:death-" + std::to_string(::getpid());
	const pid_t child = ::fork();
	ASSERT_GE(child, 0);
	if (child == 0) {
		const auto context = must(open("shm"));
		std::vector<std::byte> memory(size, std::byte{0x11});
		const auto region = must(context->register_memory(memory));
		const auto listener = must(context->listen(address));
		const auto c = must(listener->accept(soon()));
		const token t = region->remote();

		must(c->send(std::as_bytes(std::span(&t, 1))));
		std::byte buffer[64];
		(void)must(next_message(*c, buffer, soon()));
		if (memory[123] != std::byte{0x22})
			::_exit(1);
		must(c->send(bytes_of("bye")));
		::raise(SIGKILL);
	}

	here_ = must(open("shm"));
	here_region_ = must(here_->register_memory(here_memory_));
	std::unique_ptr<connection> c;
	while (!c) {
		auto r = here_->connect(address, soon());
		if (r)
			c = std::move(*r);
		else
			ASSERT_EQ(r.code(), ECONNREFUSED);
	}
	token t;
	ASSERT_EQ(must(next_message(*c, std::as_writable_bytes(std::span(&t, 1)), soon())).size(), sizeof(t));
	const segment s = {here_region_.get(), here_memory_.data(), t.addr, t.key, 4096};
	must(c->read({&s, 1}, 1));
	ASSERT_EQ(completed(*c).error, 0);
	EXPECT_EQ(here_memory_[4095], std::byte{0x11});
	std::fill(here_memory_.begin(), here_memory_.end(), std::byte{0x22});
	must(c->write({&s, 1}, 2, bytes_of("look")));
	EXPECT_EQ(completed(*c).error, 0);
	std::byte buffer[64];
	EXPECT_EQ(text_of(must(next_message(*c, buffer, soon()))), "bye");
	EXPECT_EQ(next_message(*c, buffer, soon()).code(), ECONNRESET);
	EXPECT_FALSE(c->alive());
	EXPECT_EQ(c->read({&s, 1}, 3).code(), ECONNRESET);
	int how;
	ASSERT_EQ(::waitpid(child, &how, 0), child);
	EXPECT_TRUE(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL) << how;
}

/*
 * A process that is stopped when it has looked whether it may copy, and goes on when that memory is something
 * else.
 */
class Stopped : public Shm
{
protected:
	static constexpr std::size_t bytes = 4096;

	void SetUp() override {}
	void start(bool writes)
	{
		const std::string address = shm::address() + "-stopped";

		there_memory_.assign(bytes, std::byte{0x11});
		there_ = must(open("shm"));
		there_region_ = must(there_->register_memory(there_memory_));
		listener_ = must(there_->listen(address));
		child_ = ::fork();
		ASSERT_GE(child_, 0);
		if (child_ == 0)
			::_exit(copy_once(address, writes));
		to_here_ = must(listener_->accept(soon()));
		const token t = there_region_->remote();
		must(to_here_->send(std::as_bytes(std::span(&t, 1))));
		int how;
		ASSERT_EQ(::waitpid(child_, &how, WUNTRACED), child_);
		ASSERT_TRUE(WIFSTOPPED(how)) << how;
	}
	void TearDown() override
	{
		close();
		if (child_ > 0) {
			(void)::kill(child_, SIGKILL);
			(void)::waitpid(child_, nullptr, 0);
		}
	}

	/* In the child; 0: it has not copied. */
	static int copy_once(const std::string &address, bool writes)
	{
		const auto context = must(open("shm"));
		std::vector<std::byte> memory(bytes, std::byte{0x22});
		const auto region = must(context->register_memory(memory));
		const auto c = must(context->connect(address, soon()));
		token t;
		(void)must(next_message(*c, std::as_writable_bytes(std::span(&t, 1)), soon()));
		const segment s = {region.get(), memory.data(), t.addr, t.key, bytes};

		stop_before_copy = true;
		must(writes ? c->write({&s, 1}, 1) : c->read({&s, 1}, 1));
		completion done{};
		return c->poll({&done, 1}) == 1 && done.error != 0 ? 0 : 1;
	}

	/* The memory is another's from here on. */
	void goes_on()
	{
		int how;

		std::fill(there_memory_.begin(), there_memory_.end(), std::byte{0x33});
		ASSERT_EQ(::kill(child_, SIGCONT), 0);
		ASSERT_EQ(::waitpid(std::exchange(child_, -1), &how, 0) > 0, true);
		EXPECT_TRUE(WIFEXITED(how) && WEXITSTATUS(how) == 0) << how;
		EXPECT_TRUE(
		    std::ranges::all_of(there_memory_, [](std::byte b) { return b == std::byte{0x33}; }));
	}

	pid_t child_ = -1;
};

TEST_F(Stopped, AConnectionEndsAndWhoGoesOnWritesNothing)
{
	start(true);
	testing::internal::CaptureStderr();
	to_here_.reset();
	EXPECT_NE(testing::internal::GetCapturedStderr().find(std::to_string(child_)), std::string::npos);
	there_region_.reset();
	goes_on();
}

TEST_F(Stopped, ARegionEndsWithItsConnectionAndWhoGoesOnWritesNothing)
{
	start(true);
	EXPECT_TRUE(to_here_->alive());
	there_region_.reset();
	EXPECT_FALSE(to_here_->alive());
	goes_on();
	/* And the next one is not waited for: nobody copies any more. */
	to_here_.reset();
}

TEST_F(Stopped, WhoGoesOnReadsNothing)
{
	start(false);
	to_here_.reset();
	there_region_.reset();
	goes_on();
}

TEST_F(Shm, WhoConnectsAndSaysNothingKeepsNobodyWaiting)
{
	const int silent = by_hand(shm::address(), false);
	const auto hung_up = [&] {
		pollfd p = {silent, POLLIN, 0};

		return ::poll(&p, 1, 0) == 1;
	};
	const auto begin = nprdma::transport::clock::now();

	/* Whoever looks after others besides goes on at once, and does not wait until it has to be given up.
	 */
	EXPECT_EQ(listener_->accept(begin).code(), ETIMEDOUT);
	EXPECT_FALSE(hung_up());
	for (int i = 0; i < 2; i++) {
		auto both = pair();
		EXPECT_TRUE(both.first->alive());
	}
	/* But it is not kept for ever. */
	EXPECT_EQ(listener_->accept(begin + 3s).code(), ETIMEDOUT);
	EXPECT_TRUE(hung_up());
	::close(silent);
}

/* Whoever looks after others besides comes back to them, however many call. */
TEST_F(Shm, CallersThatNeverEndAreTakenAFewAtATime)
{
	std::vector<int> calling;

	for (int i = 0; i < 64; i++)
		calling.push_back(by_hand(shm::address(), false));
	for (unsigned before = accepts, times = 0; times < 3; times++, before = accepts) {
		EXPECT_EQ(listener_->accept(nprdma::transport::clock::now()).code(), ETIMEDOUT);
		EXPECT_GT(accepts, before);
		EXPECT_LE(accepts, before + 17);
	}
	for (const int fd : calling)
		::close(fd);
}

TEST_F(Shm, APeerOfAnotherKindIsRefused)
{
	/* It connects and says nothing sensible: the listener goes on with the next. */
	const int fd = by_hand(shm::address(), false);

	ASSERT_EQ(::send(fd, "hello", 5, 0), 5);
	EXPECT_EQ(listener_->accept(soon()).code(), EPROTO);
	::close(fd);
	auto both = pair();
	EXPECT_TRUE(both.first->alive());
}

/* Who could make what he shares smaller could end us: by SIGBUS. */
TEST_F(Shm, MemoryThatAPeerCouldTakeBackIsRefused)
{
	const std::string address = shm::address() + "-by-hand";
	const int listens = by_hand(address, true);
	auto refused = std::async(std::launch::async, [&] { return here_->connect(address, soon()).code(); });
	const int line = ::accept4(listens, nullptr, nullptr, SOCK_CLOEXEC);
	const greeting good = received(line);
	ASSERT_EQ(good.count, 3u);
	const int files[] = {file_like(good.fds[0]), file_like(good.fds[1])};
	if (files[0] < 0 || files[1] < 0) {
		::close(line);
		(void)refused.get();
		GTEST_SKIP() << "all file systems here know seals";
	}

	/* Of whom it has connected to. */
	greeting answer = good;
	answer.count = 2;
	answer.fds[0] = files[0];
	answer.fds[1] = good.fds[2];
	send(line, answer);
	EXPECT_EQ(refused.get(), EPROTO);
	/* Of who connects. */
	for (const int which : {0, 1}) {
		greeting wrong = good;
		const int fd = by_hand(shm::address(), false);

		wrong.fds[which] = files[which];
		send(fd, wrong);
		EXPECT_EQ(listener_->accept(soon()).code(), EPROTO) << which;
		::close(fd);
	}
	/* And it was not for another reason. */
	const int fd = by_hand(shm::address(), false);
	send(fd, good);
	EXPECT_TRUE(listener_->accept(soon()));
	for (const int i : {fd, line, listens, files[0], files[1], good.fds[0], good.fds[1], good.fds[2]})
		::close(i);
}

/* The link is slower than memory by far, so that a duration says something about it. */
TEST_F(Shm, ALinkWithARateTakesItsTime)
{
	options slow;
	slow.bytes_per_second = 20e6;
	slow.latency = 2ms;
	make(slow, slow);
	const segment s = at(0, 0, size);
	const auto begin = nprdma::transport::clock::now();

	fill(here_memory_, 3);
	must(to_there_->write({&s, 1}, 1, bytes_of("landed")));
	std::byte buffer[16];
	EXPECT_EQ(must(to_here_->receive(buffer)), 0u);
	EXPECT_EQ(message(*to_here_), "landed");
	const auto took = nprdma::transport::clock::now() - begin;
	EXPECT_GE(took, 52ms + 2ms);
	EXPECT_EQ(completed(*to_there_).error, 0);

	/* Both directions at once take no longer; two of one direction do. */
	const auto again = nprdma::transport::clock::now();
	must(to_there_->write({&s, 1}, 2));
	must(to_there_->read({&s, 1}, 3));
	must(to_there_->read({&s, 1}, 4));
	for (int i = 0; i < 3; i++)
		EXPECT_EQ(completed(*to_there_).error, 0);
	EXPECT_GE(nprdma::transport::clock::now() - again, 104ms);
}

} // namespace
