/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/resolver.hpp"
#include "object/cq.hpp"
#include "world/clock.hpp"
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

bool too_late(kernel &k, npr_qp &qp, nanoseconds begun, int &error) noexcept
{
	const nanoseconds waited = monotonic() - begun;

	/* A queue pair that is not connected drops packets: the HCA would wait as long. */
	if (error == -ECONNREFUSED)
		return waited > std::min<nanoseconds>(k.tries_for(*qp.verbs), resolve_patience);
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

void resolver::submit(npr_qp &qp, std::uint32_t rkey) noexcept
{
	{
		const std::lock_guard lock(mutex_);
		jobs_.push_back({&qp, rkey, monotonic(), resolve_pause, 0});
	}
	wake_.notify_one();
}

void resolver::cancel(const npr_qp &qp) noexcept
{
	std::unique_lock lock(mutex_);

	std::erase_if(jobs_, [&](const job &j) { return j.qp == &qp; });
	idle_.wait(lock, [&] { return !running(qp); });
	/* the one that ran may have been put back */
	std::erase_if(jobs_, [&](const job &j) { return j.qp == &qp; });
}

bool resolver::running(const npr_qp &qp) const noexcept
{
	return std::find(running_.begin(), running_.end(), &qp) != running_.end();
}

/* What is to be asked next, now or when it is due: of what is due, fresh ones first. */
std::vector<resolver::job>::iterator resolver::pick(nanoseconds now) noexcept
{
	const auto before = [now](const job &a, const job &b) {
		const bool due = a.due <= now;

		if (due != (b.due <= now))
			return due;
		if (due && a.qp->slow != b.qp->slow)
			return b.qp->slow;
		return a.due < b.due;
	};
	auto best = jobs_.end();

	for (auto j = jobs_.begin(); j != jobs_.end(); ++j) {
		if (running(*j->qp) || (j->qp->slow && slow_ == max_slow))
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
		running_[self] = j.qp;
		const bool slow = j.qp->slow;
		slow_ += slow;
		if (!--spare_ && started_ < max_threads)
			start_spare(lock);
		else if (!jobs_.empty())
			wake_.notify_one();
		lock.unlock();

		rdma_np_region_info info;
		const nanoseconds asked = monotonic();
		int rc = kernel_.resolve(*j.qp->verbs, j.qp->cq.channel.get(), j.rkey, info);
		if (!rc)
			rc = j.qp->words.make();
		const nanoseconds after = monotonic();
		const bool again = passes(rc);
		const bool late = again && too_late(kernel_, *j.qp, j.begun, rc);
		if (!again || late)
			j.qp->cq.resolved(*j.qp, j.rkey, rc, info);

		lock.lock();
		if (again && !late) {
			j.due = after + j.pause;
			j.pause = std::min(2 * j.pause, max_resolve_pause);
			jobs_.push_back(j);
		}
		j.qp->slow = after - asked > slow_answer;
		running_[self] = nullptr;
		slow_ -= slow;
		++spare_;
		idle_.notify_all();
	}
}

} // namespace npr
