// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Machines that are slow, and nothing else: nobody is left out for that. */
#include "crew.hpp"

#include <functional>

using namespace crew;
using namespace std::chrono_literals;

namespace
{

constexpr std::size_t elements = 1000;

/* Another connection, and what happens besides. */
class line final : public transport::connection
{
public:
	explicit line(std::unique_ptr<transport::connection> of) : of_(std::move(of)) {}

	transport::status read(std::span<const transport::segment> s, std::uint64_t id) noexcept override
	{
		return of_->read(s, id);
	}
	transport::status write(std::span<const transport::segment> s, std::uint64_t id,
				std::span<const std::byte> message) noexcept override
	{
		written_ = true;
		return of_->write(s, id, message);
	}
	transport::status send(std::span<const std::byte> message) noexcept override
	{
		if (sending.count() == 0)
			return of_->send(message);
		held_.assign(message.begin(), message.end());
		due_ = transport::clock::now() + sending;
		return {};
	}
	std::size_t poll(std::span<transport::completion> to) noexcept override { return of_->poll(to); }
	transport::result<std::size_t> receive(std::span<std::byte> buffer) noexcept override
	{
		if (written_ && before_receive)
			std::exchange(before_receive, nullptr)();
		return of_->receive(buffer);
	}
	bool alive() noexcept override
	{
		deliver();
		return of_->alive();
	}
	void shutdown() noexcept override { of_->shutdown(); }
	std::size_t max_message() const noexcept override { return of_->max_message(); }
	std::size_t max_segments() const noexcept override { return of_->max_segments(); }
	std::size_t max_operations() const noexcept override { return of_->max_operations(); }
	interest prepare_wait() noexcept override
	{
		interest i = of_->prepare_wait();

		if (!held_.empty())
			i.due = std::min(i.due, due_);
		return i;
	}
	void finish_wait() noexcept override { of_->finish_wait(); }

	/* A message is there. */
	[[nodiscard]] bool has_message() noexcept
	{
		bool ready = true;

		/* What else there is to hear of is so once. */
		for (int i = 0; i < 2; ++i) {
			ready = ready && of_->prepare_wait().ready;
			of_->finish_wait();
		}
		return ready;
	}

	std::function<void()> before_receive; /* once, when something was written */
	std::chrono::milliseconds sending{0}; /* how long a message takes; with its line it is gone */

private:
	void deliver() noexcept
	{
		if (held_.empty() || transport::clock::now() < due_)
			return;
		EXPECT_TRUE(of_->send(held_));
		held_.clear();
	}

	std::vector<std::byte> held_;
	transport::clock::time_point due_;
	const std::unique_ptr<transport::connection> of_;
	bool written_ = false;
};

class listener final : public transport::listener
{
public:
	listener(transport::listener &of, std::function<void(line &)> accepted)
	    : of_(of), accepted_(std::move(accepted))
	{
	}

	transport::result<std::unique_ptr<transport::connection>>
	accept(transport::clock::time_point deadline) override
	{
		auto c = of_.accept(deadline);

		if (!c)
			return c;
		auto mine = std::make_unique<line>(std::move(*c));
		accepted_(*mine);
		return std::unique_ptr<transport::connection>(std::move(mine));
	}
	int fd() const noexcept override { return of_.fd(); }
	std::string address() const override { return of_.address(); }

private:
	transport::listener &of_;
	const std::function<void(line &)> accepted_;
};

/* One thread of each worker; whom rank 0 accepts, @accepted is told of. */
template <class F>
void run_with(std::uint32_t workers, const std::function<settings(rank_t)> &how,
	      const std::function<void(rank_t)> &before, const std::function<void(line &)> &accepted, F &&f)
{
	const auto where = addresses(workers);
	std::vector<std::thread> threads;

	for (rank_t r = 0; r < workers; ++r)
		threads.emplace_back([&, r] {
			try {
				before(r);
				transport::options o;
				o.device = device_of(r);
				const auto context = must(transport::open(where[r], link_options(o)));
				const auto plain = must(context->listen(where[r]));
				listener mine(
				    *plain, r == 0 ? accepted : [](line &) {});
				synchroniser<float> sync(*context, mine, r, where, schedule::full(workers),
							 elements, how(r));
				f(r, sync);
			} catch (const std::exception &e) {
				ADD_FAILURE() << "worker " << r << ": " << e.what();
			}
		});
	for (std::thread &t : threads)
		t.join();
}

/* To accept takes longer than a stranger has to greet, as with an adapter that is emulated. */
TEST(Slow, WhoIsAcceptedLateIsWaitedFor)
{
	unsigned accepted = 0;
	run_with(
	    2, [](rank_t) { return patient(); }, [](rank_t) {},
	    [&](line &) {
		    ++accepted;
		    std::this_thread::sleep_for(2500ms);
	    },
	    [](rank_t, synchroniser<float> &sync) {
		    const report r = must(sync.synchronise());
		    EXPECT_TRUE(r.complete);
		    EXPECT_EQ(r.contributed, 2U);
		    EXPECT_EQ(sync.stats().suspicions, 0U);
		    EXPECT_EQ(sync.stats().returns, 0U);
	    });
	EXPECT_EQ(accepted, 1U);
}

/*
 * The whole machine stands still for longer than the deadline, and worker 1 is not through with its work
 * then. It has not been asked since.
 */
TEST(Slow, AStandstillIsNoSilence)
{
	constexpr auto deadline = 2s;
	line *other = nullptr;
	std::atomic<bool> over = false;
	run_with(
	    2,
	    [&](rank_t r) {
		    settings how = patient();
		    if (r == 0)
			    how.deadline = deadline;
		    return how;
	    },
	    [](rank_t) {}, [&](line &l) { other = &l; },
	    [&](rank_t r, synchroniser<float> &sync) {
		    if (r != 0) {
			    while (!over.load())
				    std::this_thread::sleep_for(1ms);
			    std::this_thread::sleep_for(deadline / 5);
			    must(sync.synchronise());
			    return;
		    }
		    other->before_receive = [&] {
			    std::this_thread::sleep_for(deadline + 200ms);
			    over.store(true);
		    };
		    EXPECT_EQ(must(sync.synchronise()).contributed, 2U);
		    EXPECT_EQ(sync.stats().suspicions, 0U);
	    });
}

/* Worker 2 connects to both others, and ends; worker 3 never comes. */
TEST(Slow, WhoIsGoneBeforeAllHaveComeIsNamedAtOnce)
{
	const auto where = addresses(4);
	std::string said[4];
	std::vector<std::thread> threads;
	std::atomic<unsigned> accepted = 0;
	const auto work = [&](rank_t r) {
		transport::options o;
		o.device = device_of(r);
		const auto context = must(transport::open(where[r], link_options(o)));
		const auto plain = must(context->listen(where[r]));
		listener mine(*plain, [&](line &) { accepted.fetch_add(1); });
		settings how = patient();
		if (r == 2)
			how.founding = 5s;
		try {
			synchroniser<float> sync(*context, mine, r, where, schedule::full(4), elements, how);
		} catch (const std::system_error &e) {
			said[r] = e.what();
		}
	};
	const auto begin = transport::clock::now();

	for (rank_t r = 0; r < 3; ++r)
		threads.emplace_back(work, r);
	for (std::thread &t : threads)
		t.join();
	EXPECT_EQ(accepted.load(), 3U);
	EXPECT_NE(said[2].find("worker 3 has not connected"), std::string::npos) << said[2];
	for (const rank_t r : {0, 1})
		EXPECT_NE(said[r].find("has connected, and is gone"), std::string::npos) << said[r];
	EXPECT_LT(transport::clock::now() - begin, patient().founding);
}

/* What is sent over verbs is gone if its line ends before it is on its way. */
TEST(Slow, WhoIsTurnedAwayHearsWhy)
{
	const auto where = addresses(2);
	std::string said[2];
	std::vector<std::thread> threads;

	for (rank_t r = 0; r < 2; ++r)
		threads.emplace_back([&, r] {
			transport::options o;
			o.device = device_of(r);
			const auto context = must(transport::open(where[r], link_options(o)));
			const auto plain = must(context->listen(where[r]));
			listener mine(*plain, [](line &l) { l.sending = 300ms; });
			settings how = patient();
			how.founding = 20s;
			try {
				synchroniser<float> sync(*context, mine, r, where, schedule::full(2),
							 elements + r, how);
			} catch (const std::system_error &e) {
				said[r] = e.what();
			}
		});
	for (std::thread &t : threads)
		t.join();
	for (const std::string &s : said)
		EXPECT_NE(s.find("another number of parameters"), std::string::npos) << s;
}

/*
 * Worker 0 is busy with the line of worker 2 for longer than its deadline, or stopped there. Meanwhile
 * something has come from worker 1, so that one was not silent.
 */
TEST(Slow, WhatCameMeanwhileIsNoSilence)
{
	constexpr auto deadline = 1s;
	line *lines[2] = {};
	std::atomic<unsigned> accepted = 0;
	std::atomic<bool> busy = false;
	run_with(
	    3,
	    [&](rank_t r) {
		    settings how = patient();
		    if (r == 0)
			    how.deadline = deadline;
		    return how;
	    },
	    [&](rank_t r) {
		    /* So it is known which line is whose. */
		    while (r == 2 && accepted.load() < 1)
			    std::this_thread::yield();
	    },
	    [&](line &l) {
		    if (accepted.load() < 2)
			    lines[accepted.load()] = &l;
		    accepted.fetch_add(1);
	    },
	    [&](rank_t r, synchroniser<float> &sync) {
		    if (r != 0) {
			    while (!busy.load())
				    std::this_thread::yield();
			    must(sync.synchronise());
			    return;
		    }
		    ASSERT_EQ(accepted.load(), 2U);
		    lines[1]->before_receive = [&] {
			    const auto until = transport::clock::now() + deadline;
			    busy.store(true);
			    while (transport::clock::now() < until || !lines[0]->has_message())
				    std::this_thread::sleep_for(1ms);
		    };
		    /* What comes after the pieces may be late on a machine that is. */
		    EXPECT_EQ(must(sync.synchronise()).contributed, 3U);
	    });
}

} // namespace
