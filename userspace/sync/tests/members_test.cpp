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
#include <utility>

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
	std::atomic<std::uint32_t> founded{0}; /* processes that have */
	std::atomic<std::uint32_t> without{0}; /* workers that have seen that the odd one is out */
	std::atomic<std::uint32_t> with{0};    /* that have seen that all are in, afterwards */
	std::atomic<std::uint64_t> goal{0};    /* the step at which all end */
	std::atomic<std::uint32_t> good{0};    /* that ended so */
	std::atomic<std::uint32_t> late{0};    /* times that one was left out to whom nothing had happened */
	std::atomic<bool> over{false};         /* somebody has given up */
};

/*
 * On a machine that is slow enough what is to happen to one worker happens to others: a deadline says nothing
 * of them then. So @attempt(settings, last) returns false if any was late that was not meant to be, and is
 * made again with four times as much time; @last: it counts whatever happens. What is wrong whatever the
 * deadline is fails it.
 */
template <class F> void with_time_enough(std::chrono::milliseconds deadline, F &&attempt)
{
	for (bool done = false; !done; deadline *= 4) {
		settings how = patient();
		const bool last = deadline >= std::chrono::seconds(30);

		how.deadline = deadline;
		done = attempt(how, last) || last;
	}
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
bool go_on(worker<float> &w, board &b)
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

bool others(worker<float> &w, board &b)
{
	const bool good = go_on(w, b);

	b.late.fetch_add(w.sync->stats().returns);
	if (!good)
		b.over.store(true);
	return good;
}

/* False: they have given up. */
bool wait_for_others(const board &b)
{
	while (b.without.load() < workers - 1 && !b.over.load())
		std::this_thread::sleep_for(std::chrono::milliseconds(1));
	return !b.over.load();
}

/* The odd one, before what is to happen to it. */
void take_part(worker<float> &w, board &b)
{
	must(w.sync->synchronise());
	/* If it was left out before, it is back, and its values count: also those of come_back(). */
	b.late.fetch_add(w.sync->stats().returns);
}

/* The odd one: its old values must not count, and it has those of the others at the end. */
bool come_back(worker<float> &w, board &b)
{
	std::fill(w.sync->parameters().begin(), w.sync->parameters().end(), 1e9F);
	const bool good = finish_together(w, b) && all_in_range(w.sync->parameters(), 0, 2);

	b.late.fetch_add(std::max(w.sync->stats().returns, 1U) - 1);
	return good;
}

void expect_all_good(board &b)
{
	EXPECT_EQ(b.good.load(), workers);
	EXPECT_GE(b.without.load(), workers - 1);
}

/* It is only late: it waits until the others have gone on without it. */
TEST(Members, LateOneIsLeftOutAndComesBack)
{
	for (const char *name : {"grid", "random:2:9"})
		with_time_enough(std::chrono::seconds(2), [&](const settings &how, bool last) {
			board b;
			std::atomic<std::uint32_t> returns = 0;
			std::atomic<std::uint64_t> discarded = 0;

			const auto work = [&](worker<float> &w) {
				bool good;
				if (w.rank == odd) {
					take_part(w, b);
					good = wait_for_others(b) && come_back(w, b);
					returns.store(w.sync->stats().returns);
				} else {
					good = others(w, b);
					discarded.fetch_add(w.sync->stats().discarded);
				}
				b.good.fetch_add(good);
			};
			run<float>(schedule::parse(name, workers), elements, how, work);
			if (b.late.load() && !last)
				return false;
			EXPECT_GE(returns.load(), 1U);
			EXPECT_EQ(discarded.load(), 0U);
			expect_all_good(b);
			return true;
		});
}

TEST(Members, NobodyIsLeftOutBeforeTheDeadline)
{
	with_time_enough(std::chrono::milliseconds(1500), [](const settings &how, bool last) {
		std::atomic<bool> left_out = false, late = false;
		std::chrono::nanoseconds took{};
		report without, again;
		std::uint32_t suspicions = 0;

		const auto work = [&](worker<float> &w) {
			must(w.sync->synchronise());
			if (w.sync->stats().suspicions)
				late.store(true);
			if (w.rank == 1) {
				while (!left_out.load())
					std::this_thread::yield();
				return;
			}
			const auto begun = std::chrono::steady_clock::now();
			without = must(w.sync->synchronise());
			took = std::chrono::steady_clock::now() - begun;
			again = must(w.sync->synchronise());
			suspicions = w.sync->stats().suspicions;
			left_out.store(true);
		};
		run<float>(schedule::full(2), elements, how, work);
		if (late.load() && !last)
			return false;
		EXPECT_GE(took, how.deadline);
		EXPECT_FALSE(without.complete);
		EXPECT_EQ(without.contributed, 1U);
		/* It is not waited for again: there is nobody else in the group. */
		EXPECT_EQ(again.group, 1U);
		EXPECT_EQ(suspicions, 1U);
		return true;
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
	const schedule who = schedule::parse("0,1|2|3;0|1,2|3;0|1|2,3", 4);

	with_time_enough(std::chrono::seconds(10), [&](const settings &how, bool last) {
		std::atomic<std::uint32_t> suspicions = 0, incomplete = 0;

		const auto work = [&](worker<float> &w) {
			/* Each of the three is silent for less than the deadline, one after the other. */
			if (w.rank == 0)
				std::this_thread::sleep_for(how.deadline * 6 / 10);
			for (int k = 0; k < 3; ++k) {
				if (w.rank == 1 && k == 1)
					std::this_thread::sleep_for(how.deadline * 6 / 10);
				incomplete.fetch_add(!must(w.sync->synchronise()).complete);
			}
			w.sync->barrier(std::array<rank_t, 4>{0, 1, 2, 3});
			suspicions.fetch_add(w.sync->stats().suspicions);
		};
		run<float>(who, elements, how, work);
		if ((suspicions.load() || incomplete.load()) && !last)
			return false;
		EXPECT_EQ(suspicions.load(), 0U);
		EXPECT_EQ(incomplete.load(), 0U);
		return true;
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
		end_all();
		::munmap(board_, sizeof(board));
	}
	void end_all()
	{
		for (pid_t &p : children_)
			if (p > 0)
				::kill(std::exchange(p, 0), SIGKILL);
		while (::wait(nullptr) > 0)
			;
	}
	/* Others at other addresses. */
	void begin_anew()
	{
		end_all();
		new (board_) board;
		where_ = addresses(workers);
	}

	pid_t spawn(rank_t rank, const settings &how, const std::function<bool(worker<float> &)> &f)
	{
		const pid_t child = ::fork();
		if (child == 0) {
			bool good = false;
			try {
				worker<float> w(rank, where_, schedule::grid(2, 2), elements, how);
				/* As in run(); for who comes back all have. */
				board_->founded.fetch_add(1);
				while (board_->founded.load() < workers)
					::usleep(1000);
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
	std::vector<std::string> where_ = addresses(workers);
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
	ASSERT_TRUE(wait_for_others(*board_));
	settings how = patient();
	how.comes_back = true;
	spawn(odd, how, [&](worker<float> &w) { return come_back(w, *board_); });
	for (rank_t r = 0; r < workers; ++r)
		EXPECT_EQ(end_of(r), 0) << r;
}

TEST_F(Processes, StoppedOneIsLeftOutAndComesBack)
{
	ASSERT_NE(board_, nullptr);
	with_time_enough(std::chrono::seconds(2), [&](const settings &how, bool last) {
		begin_anew();
		for (rank_t r = 0; r < odd; ++r)
			spawn(r, how, [&](worker<float> &w) { return others(w, *board_); });
		const pid_t child = spawn(odd, how, [&](worker<float> &w) {
			take_part(w, *board_);
			::raise(SIGSTOP);
			return come_back(w, *board_);
		});
		int status = 0;
		EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
		EXPECT_TRUE(WIFSTOPPED(status));
		const bool went_on = wait_for_others(*board_);
		::kill(child, SIGCONT);
		std::array<int, workers> ends{};
		for (rank_t r = 0; r < workers; ++r)
			ends[r] = end_of(r);
		if (board_->late.load() && !last)
			return false;
		EXPECT_TRUE(went_on);
		for (rank_t r = 0; r < workers; ++r)
			EXPECT_EQ(ends[r], 0) << r;
		return true;
	});
}

} // namespace
