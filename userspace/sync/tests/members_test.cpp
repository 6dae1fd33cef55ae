// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Workers that die, are late, and come back: the others go on. As threads, and as processes. */
#include "crew.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <csignal>
#include <functional>
#include <sys/mman.h>
#include <sys/wait.h>

using namespace crew;

namespace
{

constexpr std::uint32_t workers = 4;
constexpr rank_t odd = 3; /* the one that something happens to */
constexpr std::size_t elements = 1000;
constexpr auto give_up = std::chrono::minutes(4);

/* What the workers know of each other besides; in memory that processes share. Its atomics order nothing but
 * themselves. */
struct board {
	std::atomic<std::uint32_t> without{0}; /* workers that have seen that the odd one is out */
	std::atomic<std::uint32_t> with{0};    /* that have seen that all are in, afterwards */
	std::atomic<std::uint64_t> goal{0};    /* the step at which all end */
	std::atomic<std::uint32_t> good{0};    /* that ended so */
};

settings hasty(settings how = {})
{
	how.deadline = std::chrono::seconds(2);
	how.founding = std::chrono::minutes(2);
	return how;
}

bool all_in_range(std::span<const float> x, float low, float high)
{
	for (const float v : x)
		if (!(v >= low && v <= high))
			return false;
	return true;
}

/* Steps until @until says so; false: it takes too long. */
bool step_until(worker<float> &w, const std::function<bool()> &until)
{
	const auto begun = std::chrono::steady_clock::now();

	while (!until()) {
		if (std::chrono::steady_clock::now() - begun > give_up) {
			std::fprintf(stderr, "worker %u gives up at step %llu\n", w.rank,
				     static_cast<unsigned long long>(w.sync->next_step()));
			return false;
		}
		must(w.sync->synchronise());
	}
	return true;
}

/* The step that all go on to, a few after whoever finds out last that all are there. */
bool finish_together(worker<float> &w, board &b)
{
	const auto all = [&] { return w.sync->present().size() == workers; };

	if (!step_until(w, all))
		return false;
	if (b.with.fetch_add(1) + 1 == workers)
		b.goal.store(w.sync->next_step() + 20);
	return step_until(w, [&] {
		const std::uint64_t goal = b.goal.load();
		return goal && w.sync->next_step() > goal;
	});
}

/* What the three do while the odd one is away. Their values stay between those that they began with. */
bool others(worker<float> &w, board &b)
{
	std::fill(w.sync->parameters().begin(), w.sync->parameters().end(), static_cast<float>(w.rank));
	const auto out = [&] {
		const auto now = w.sync->present();
		return std::find(now.begin(), now.end(), odd) == now.end();
	};
	if (!step_until(w, out))
		return false;
	b.without.fetch_add(1);
	/* So that the odd one finds them in the middle of their work. */
	if (!step_until(w, [&] { return b.without.load() >= workers - 1; }) || !finish_together(w, b))
		return false;
	return all_in_range(w.sync->parameters(), 0, 2);
}

/* The odd one: its old values must not count, and it has those of the others at the end. */
bool come_back(worker<float> &w, board &b)
{
	std::fill(w.sync->parameters().begin(), w.sync->parameters().end(), 1e9F);
	return finish_together(w, b) && all_in_range(w.sync->parameters(), 0, 2);
}

void expect_all_good(board &b)
{
	EXPECT_EQ(b.good.load(), workers);
	EXPECT_GE(b.without.load(), workers - 1);
}

/* It is only late: it waits until the others have gone on without it. */
TEST(Members, LateOneIsLeftOutAndComesBack)
{
	for (const char *name : {"grid", "random:2:9"}) {
		board b;
		run<float>(schedule::parse(name, workers), elements, hasty(), [&](worker<float> &w) {
			bool good;
			if (w.rank == odd) {
				must(w.sync->synchronise());
				while (b.without.load() < workers - 1)
					std::this_thread::yield();
				good = come_back(w, b);
				EXPECT_GE(w.sync->stats().returns, 1U);
			} else {
				good = others(w, b);
				EXPECT_EQ(w.sync->stats().discarded, 0U);
			}
			b.good.fetch_add(good);
		});
		expect_all_good(b);
	}
}

TEST(Members, NobodyIsLeftOutBeforeTheDeadline)
{
	settings how = patient();
	how.deadline = std::chrono::milliseconds(1500);
	std::atomic<bool> left_out = false;
	run<float>(schedule::full(2), elements, how, [&](worker<float> &w) {
		must(w.sync->synchronise());
		if (w.rank == 1) {
			while (!left_out.load())
				std::this_thread::yield();
			return;
		}
		const auto begun = std::chrono::steady_clock::now();
		const report r = must(w.sync->synchronise());
		EXPECT_GE(std::chrono::steady_clock::now() - begun, how.deadline);
		EXPECT_FALSE(r.complete);
		EXPECT_EQ(r.contributed, 1U);
		EXPECT_EQ(w.sync->stats().suspicions, 1U);
		/* It is not waited for again. */
		const auto again = std::chrono::steady_clock::now();
		EXPECT_EQ(must(w.sync->synchronise()).group, 1U);
		EXPECT_LT(std::chrono::steady_clock::now() - again, how.deadline);
		left_out.store(true);
	});
}

/* A worker that is gone is known to be at once, whatever the deadline. */
TEST(Members, DeadOneIsNotWaitedFor)
{
	run<float>(schedule::full(3), elements, patient(), [&](worker<float> &w) {
		fill(w);
		must(w.sync->synchronise());
		if (w.rank == 2)
			return;
		const auto begun = std::chrono::steady_clock::now();
		/* One may learn of it a step before the other, and that step is complete for neither. */
		report r;
		do
			r = must(w.sync->synchronise());
		while (r.group == 3 || !r.complete);
		EXPECT_LT(std::chrono::steady_clock::now() - begun, patient().deadline / 2);
		EXPECT_EQ(r.group, 2U);
		EXPECT_EQ(w.sync->present(), (std::vector<rank_t>{0, 1}));
		expect_mean(w, 3, 1e-4);
		/* Before one of them is gone as well. */
		w.sync->barrier(std::array<rank_t, 2>{0, 1});
	});
}

TEST(Members, AllReduceWithoutOneFails)
{
	run<float>(schedule::full(3), elements, patient(), [&](worker<float> &w) {
		if (w.rank == 2)
			return;
		for (const auto how :
		     {synchroniser<float>::algorithm::ring, synchroniser<float>::algorithm::halving_doubling,
		      synchroniser<float>::algorithm::direct})
			EXPECT_EQ(w.sync->all_reduce(how).code(), ECONNRESET);
	});
}

/* 2 waits for 1, which waits for 0, longer than anybody may be silent: but who waits is not silent. */
TEST(Members, WhoWaitsForALateOneIsNotSuspected)
{
	settings how = patient();
	how.deadline = std::chrono::seconds(10);
	run<float>(schedule::parse("0,1|2|3;0|1,2|3;0|1|2,3", 4), elements, how, [&](worker<float> &w) {
		/* Each of the three is silent for less than the deadline, one after the other. */
		if (w.rank == 0)
			std::this_thread::sleep_for(how.deadline * 6 / 10);
		for (int k = 0; k < 3; ++k) {
			if (w.rank == 1 && k == 1)
				std::this_thread::sleep_for(how.deadline * 6 / 10);
			EXPECT_TRUE(must(w.sync->synchronise()).complete);
		}
		EXPECT_EQ(w.sync->stats().suspicions, 0U);
		w.sync->barrier(std::array<rank_t, 4>{0, 1, 2, 3});
	});
}

/* The same between processes, of which one is killed, and started again. */
class Processes : public testing::Test
{
protected:
	Processes()
	{
		void *const p =
		    ::mmap(nullptr, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		board_ = p == MAP_FAILED ? nullptr : new (p) board;
	}
	~Processes() override
	{
		for (const pid_t p : children_)
			if (p > 0)
				::kill(p, SIGKILL);
		while (::wait(nullptr) > 0)
			;
		::munmap(board_, sizeof(board));
	}

	pid_t spawn(rank_t rank, const settings &how, const std::function<bool(worker<float> &)> &f)
	{
		const pid_t child = ::fork();
		if (child == 0) {
			bool good = false;
			try {
				worker<float> w(rank, where_, schedule::grid(2, 2), elements, how);
				good = f(w);
			} catch (const std::exception &e) {
				std::fprintf(stderr, "worker %u: %s\n", rank, e.what());
			}
			::_exit(good ? 0 : 1);
		}
		children_[rank] = child;
		return child;
	}
	/* Its exit status; of one that was killed, 128 + the signal. */
	int end_of(rank_t rank)
	{
		int status = 0;
		EXPECT_EQ(::waitpid(children_[rank], &status, 0), children_[rank]);
		children_[rank] = 0;
		return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
	}

	board *board_ = nullptr;
	const std::vector<std::string> where_ = addresses(workers);
	std::array<pid_t, workers> children_{};
};

TEST_F(Processes, KilledOneIsLeftOutAndComesBackAsAnotherProcess)
{
	ASSERT_NE(board_, nullptr);
	for (rank_t r = 0; r < odd; ++r)
		spawn(r, patient(), [&](worker<float> &w) { return others(w, *board_); });
	spawn(odd, patient(), [](worker<float> &w) {
		must(w.sync->synchronise());
		return ::raise(SIGKILL) == 0;
	});
	EXPECT_EQ(end_of(odd), 128 + SIGKILL);
	while (board_->without.load() < workers - 1)
		::usleep(1000); /* or the test's time-out */
	settings how = patient();
	how.comes_back = true;
	spawn(odd, how, [&](worker<float> &w) { return come_back(w, *board_); });
	for (rank_t r = 0; r < workers; ++r)
		EXPECT_EQ(end_of(r), 0) << r;
}

TEST_F(Processes, StoppedOneIsLeftOutAndComesBack)
{
	ASSERT_NE(board_, nullptr);
	for (rank_t r = 0; r < odd; ++r)
		spawn(r, hasty(), [&](worker<float> &w) { return others(w, *board_); });
	const pid_t child = spawn(odd, hasty(), [&](worker<float> &w) {
		must(w.sync->synchronise());
		::raise(SIGSTOP);
		return come_back(w, *board_);
	});
	int status = 0;
	EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
	EXPECT_TRUE(WIFSTOPPED(status));
	while (board_->without.load() < workers - 1)
		::usleep(1000);
	::kill(child, SIGCONT);
	for (rank_t r = 0; r < workers; ++r)
		EXPECT_EQ(end_of(r), 0) << r;
}

} // namespace
