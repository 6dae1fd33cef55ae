/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/resolver.hpp"
#include "world/clock.hpp"
#include "world/own_thread.hpp"
#include "world/signals_blocked.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace npr {

bool passes(int error) noexcept
{
	return error == -EBUSY || error == -EAGAIN || error == -EINTR || error == -ENOMEM ||
	       error == -ECONNREFUSED;
}

bool too_late(resolver::client &who, nanoseconds begun, int &error) noexcept
{
	const nanoseconds waited = monotonic() - begun;

	/* A queue pair that is not connected drops packets: the HCA would wait as long. */
	if (error == -ECONNREFUSED)
		return waited > std::min(who.tries_for(), resolve_patience);
	if (waited <= resolve_patience)
		return false;
	if (error != -ENOMEM)
		error = -ETIMEDOUT;
	return true;
}

resolver::~resolver()
{
	{
		const std::lock_guard lock(mutex_);
		stop_ = true;
	}
	wake_.notify_all();
	/* In this order: each was started by one before it, which has ended by then. */
	for (std::thread &t : threads_)
		if (t.joinable())
			t.join();
}

void resolver::reserve(std::size_t requests)
{
	const std::lock_guard lock(mutex_);

	jobs_.reserve(reserved_ + requests);
	if (!started_) {
		/* the spares have it from the first */
		const signals_blocked here;
		threads_[0] = std::thread([this] { run(0); });
		started_ = spare_ = 1;
	}
	reserved_ += requests;
}

void resolver::unreserve(std::size_t requests) noexcept
{
	const std::lock_guard lock(mutex_);

	reserved_ -= requests;
}

void resolver::submit(client &who, const remote_key &key) noexcept
{
	{
		const std::lock_guard lock(mutex_);
		jobs_.push_back({&who, key, monotonic(), resolve_pause, 0});
	}
	wake_.notify_one();
}

void resolver::cancel(const client &who) noexcept
{
	std::unique_lock lock(mutex_);

	std::erase_if(jobs_, [&](const job &j) { return j.who == &who; });
	idle_.wait(lock, [&] { return !running(who); });
	/* the one that ran may have been put back */
	std::erase_if(jobs_, [&](const job &j) { return j.who == &who; });
}

bool resolver::running(const client &who) const noexcept
{
	return std::find(running_.begin(), running_.end(), &who) != running_.end();
}

/* What is to be asked next, now or when it is due: of what is due, fresh ones first. */
std::vector<resolver::job>::iterator resolver::pick(nanoseconds now) noexcept
{
	const auto before = [now](const job &a, const job &b) {
		const bool due = a.due <= now;

		if (due != (b.due <= now))
			return due;
		if (due && a.who->slow_ != b.who->slow_)
			return b.who->slow_;
		return a.due < b.due;
	};
	auto best = jobs_.end();

	for (auto j = jobs_.begin(); j != jobs_.end(); ++j) {
		if (running(*j->who) || (j->who->slow_ && slow_ == max_slow))
			continue;
		if (best == jobs_.end() || before(*j, *best))
			best = j;
	}
	return best;
}

/* Gives @lock back meanwhile: who submits something must not wait for a thread to begin. */
void resolver::start_spare(std::unique_lock<std::mutex> &lock) noexcept
{
	const std::size_t i = started_++;
	bool failed = false;

	/* as long as it is counted nobody else starts one */
	++spare_;
	lock.unlock();
	try {
		threads_[i] = std::thread([this, i] { run(i); });
	} catch (const std::exception &) {
		failed = true;
	}
	lock.lock();
	if (failed) {
		--started_;
		--spare_;
	}
}

void resolver::run(std::size_t self) noexcept
{
	become_own_thread("nprdma-resolver");
	std::unique_lock lock(mutex_);

	while (!stop_) {
		const nanoseconds now = monotonic();
		const auto next = pick(now);
		if (next == jobs_.end()) {
			wake_.wait(lock);
			continue;
		}
		if (next->due > now) {
			wake_.wait_for(lock, std::chrono::nanoseconds(next->due - now));
			continue;
		}
		job j = *next;
		jobs_.erase(next);
		/* patience with the peer, not with those who come first here */
		if (!j.begun)
			j.begun = now;
		running_[self] = j.who;
		const bool slow = j.who->slow_;
		slow_ += slow;
		if (!--spare_ && started_ < max_threads)
			start_spare(lock);
		else if (!jobs_.empty())
			wake_.notify_one();
		lock.unlock();

		rdma_np_region_info info{};
		const nanoseconds asked = monotonic();
		int rc = j.who->ask(j.key, info);
		const nanoseconds after = monotonic();
		const bool again = passes(rc);
		const bool late = again && too_late(*j.who, j.begun, rc);
		if (!again || late)
			j.who->answered(j.key, rc, info);

		lock.lock();
		if (again && !late) {
			j.due = after + j.pause;
			j.pause = std::min(2 * j.pause, max_resolve_pause);
			jobs_.push_back(j);
		}
		j.who->slow_ = after - asked > slow_answer;
		running_[self] = nullptr;
		slow_ -= slow;
		++spare_;
		idle_.notify_all();
	}
}

} // namespace npr
