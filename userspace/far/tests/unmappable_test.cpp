/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Pages that the kernel does not map: who touches them hears of it, and what was written to them stays. */
#include "counting.hpp"
#include "uffd.hpp"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace
{
std::atomic<bool> maps_fail = false;
}

/* The program's ioctl(), which is found before that of libc. */
extern "C" __attribute__((visibility("default"))) int ioctl(int fd, unsigned long request, ...) noexcept
{
	va_list args;

	va_start(args, request);
	void *const arg = va_arg(args, void *);
	va_end(args);
	if (request == UFFDIO_CONTINUE && maps_fail) {
		errno = ENOMEM;
		return -1;
	}
	return static_cast<int>(::syscall(SYS_ioctl, fd, request, arg));
}

namespace
{

using namespace far_tests;

/* How a page that was written to comes to be in its frame, and not mapped. */
enum class away { cold, taken_by_the_kernel };

class Unmappable : public testing::TestWithParam<away>
{
protected:
	static constexpr std::size_t page = 5;

	void SetUp() override
	{
		*word() = 7;
		maps_fail = true;
		/* The pager may not be through with the page yet: then a touch still finds it mapped. */
		int signal;
		do {
			if (GetParam() == away::cold)
				must(map_->advise(page * 4096, 4096, hint::cold));
			else
				ASSERT_EQ(::madvise(map_->memory().data() + page * 4096, 4096, MADV_DONTNEED),
					  0);
			signal = touched();
		} while (!signal && ++tries_ < 100'000);
		EXPECT_EQ(signal, SIGBUS);
		maps_fail = false;
		/* And the next one hears of it, too. */
		EXPECT_EQ(touched(), SIGBUS);
		EXPECT_EQ(map_->last_error().code, ENOMEM);
	}
	void TearDown() override { maps_fail = false; }

	[[nodiscard]] volatile std::uint64_t *word() const { return words(*map_) + page * 512; }
	[[nodiscard]] int touched() const { return signal_at(map_->memory().data() + page * 4096); }
	[[nodiscard]] std::uint64_t stored() const
	{
		std::uint64_t is;

		std::memcpy(&is, back_->memory_.data() + page * 4096, sizeof(is));
		return is;
	}

	int tries_ = 0;
	/* Another value than what is written. */
	static std::shared_ptr<counting> one_in_page()
	{
		auto back = std::make_shared<counting>(64 * 4096);

		back->memory_[page * 4096] = 1;
		return back;
	}
	const std::shared_ptr<counting> back_ = one_in_page();
	const std::unique_ptr<pager> pager_ = must(pager::make(small_buffer(1 << 20)));
	const std::unique_ptr<mapping> map_ = must(pager_->map(back_));
};

TEST_P(Unmappable, RetryFindsWhatWasWritten)
{
	map_->retry();
	ASSERT_EQ(touched(), 0);
	EXPECT_EQ(*word(), 7u);
}

TEST_P(Unmappable, FlushWritesItBack)
{
	must(map_->flush());
	EXPECT_EQ(stored(), 7u);
	ASSERT_EQ(touched(), 0);
	EXPECT_EQ(*word(), 7u);
}

TEST_P(Unmappable, EvictionWritesItBackOrKeepsIt)
{
	back_->fail_writes = true;
	EXPECT_EQ(map_->evict().code(), EIO);
	EXPECT_EQ(map_->stats().resident_bytes, 4096u);
	back_->fail_writes = false;
	must(map_->evict());
	EXPECT_EQ(map_->stats().resident_bytes, 0u);
	EXPECT_EQ(stored(), 7u);
	ASSERT_EQ(touched(), 0);
	EXPECT_EQ(*word(), 7u);
}

/* By those who make room. */
TEST_P(Unmappable, APageThatOthersPushOutIsWrittenBack)
{
	pager_->set_buffer_bytes(1);
	for (std::size_t i = 8; i < 64; i++)
		(void)const_cast<const volatile std::uint64_t *>(words(*map_))[i * 512];
	EXPECT_EQ(back_->writes, 1);
	ASSERT_EQ(touched(), 0);
	EXPECT_EQ(*word(), 7u);
}

TEST_P(Unmappable, UnmappingWritesItBack)
{
	back_->fail_writes = true;
	EXPECT_EQ(map_->unmap(page * 4096, 4096).code(), EIO);
	back_->fail_writes = false;
	must(map_->unmap(page * 4096, 4096));
	EXPECT_EQ(stored(), 7u);
	EXPECT_EQ(pager_->stats().resident_bytes, 0u);
}

TEST_P(Unmappable, DiscardForgetsIt)
{
	must(map_->discard(page * 4096, 4096));
	EXPECT_EQ(map_->stats().resident_bytes, 0u);
	ASSERT_EQ(touched(), 0);
}

TEST_P(Unmappable, APinSaysThatItIsNotThere)
{
	EXPECT_EQ(map_->advise(page * 4096, 4096, hint::pin).code(), EIO);
	map_->retry();
	must(map_->advise(page * 4096, 4096, hint::pin));
}

INSTANTIATE_TEST_SUITE_P(Far, Unmappable, testing::Values(away::cold, away::taken_by_the_kernel),
			 [](const auto &i) { return i.param == away::cold ? "Cold" : "TakenByTheKernel"; });

/* What was only read is with the store: its frame is not kept. */
TEST(Unmapped, APageThatWasOnlyReadIsBroughtAgain)
{
	const auto back = std::make_shared<counting>(16 * 4096);
	back->memory_[0] = 3;
	const auto p = must(pager::make(small_buffer(1 << 20)));
	const auto m = must(p->map(back));

	maps_fail = true;
	EXPECT_EQ(signal_at(m->memory().data()), SIGBUS);
	maps_fail = false;
	EXPECT_EQ(m->stats().resident_bytes, 0u);
	m->retry();
	EXPECT_EQ(words(*m)[0], 3u);
	EXPECT_EQ(back->reads, 2);
}

} // namespace
