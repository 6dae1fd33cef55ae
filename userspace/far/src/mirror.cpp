/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The same data in several stores. A store is in use, or behind, or catching up: then it gets what is
 * written, and is not read from.
 *
 * Who leaves a store out advances the generation of the others first, and only then says of anything that it
 * is written. So a store that is not of the newest generation is behind, whoever looks and whenever, and one
 * that is of it has all that was ever said to be written.
 */
#include "owners.hpp"

#include <nprdma/far_network.hpp>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <shared_mutex>

namespace nprdma::far
{

namespace
{

constexpr std::size_t copy_bytes = 4 << 20; /* the largest page of a region */

enum class role : std::uint8_t { in_use, catching, behind };

class mirror final : public mirrored
{
public:
	explicit mirror(std::vector<std::shared_ptr<store>> stores)
	    : stores_(std::move(stores)), roles_(stores_.size()), whys_(stores_.size(), error{0, {}})
	{
	}

	/* Who is behind whom? */
	status start()
	{
		std::vector<data_generation> all;

		for (std::size_t i = 0; i < stores_.size(); i++) {
			result<data_generation> g = stores_[i]->generation();

			if (!g)
				return error{g.code(), "mirror: " + g.why().text};
			all.push_back(*g);
			if (g->number > now_.number)
				now_ = *g;
		}
		for (std::size_t i = 0; i < all.size(); i++) {
			if (all[i] == now_)
				continue;
			if (all[i].number == now_.number)
				return error{ENOTUNIQ,
					     "mirror: two of the stores were each written to without "
					     "the other one, and neither is the newer one"};
			set_behind(i, {ESTALE, "mirror: it lacks what was written while it was left out"});
		}
		/* From now on one that has lost everything is behind those that have not. */
		if (!now_.number) {
			const data_generation first = {1, some_tag()};

			for (const auto &s : stores_)
				if (status set = s->set_generation(first); !set)
					return set.code() == EROFS && s == stores_[0] ? status{} : set;
			now_ = first;
		}
		return {};
	}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return stores_[0]->bytes(); }
	status read(const piece &p) noexcept override { return read_many({&p, 1}); }
	status write(const piece &p) noexcept override { return write_many({&p, 1}); }
	status read_many(std::span<const piece> pieces) noexcept override
	{
		status s = none_left();
		/* relaxed: any of them will do that is in use */
		const std::size_t first = first_.load(std::memory_order_relaxed);

		for (std::size_t n = 0; n < stores_.size(); n++) {
			const std::size_t i = (first + n) % stores_.size();

			if (!in_use(i))
				continue;
			s = stores_[i]->read_many(pieces);
			see(s);
			if (superseded_.load(std::memory_order_relaxed))
				return superseded();
			if (s && !stores_[i]->intact() && !alone(i)) {
				/* What it read may be older than what the others have. */
				(void)leave_out_lost({i});
				s = none_left();
			} else if (s) {
				/* One that does not answer costs its deadline: the next read begins here. */
				if (n)
					first_.store(i, std::memory_order_relaxed);
				return s;
			}
		}
		return s;
	}
	status write_many(std::span<const piece> pieces) noexcept override
	{
		const std::shared_lock guard = writing();

		return each(true, [&](store &s) { return s.write_many(pieces); });
	}
	[[nodiscard]] bool written(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		for (std::size_t i = 0; i < stores_.size(); i++)
			if (in_use(i))
				return stores_[i]->written(offset, size);
		return true;
	}
	status flush() noexcept override
	{
		return each(false, [](store &s) { return s.flush(); });
	}
	[[nodiscard]] bool intact() noexcept override
	{
		for (std::size_t i = 0; i < stores_.size(); i++)
			if (in_use(i) && stores_[i]->intact())
				return true;
		return false;
	}
	/* The first one is what the data are now: others may have lost other things. */
	status accept_loss() noexcept override
	{
		std::vector<std::size_t> others;
		store *first = nullptr;

		if (intact())
			return {};
		for (std::size_t i = 0; i < stores_.size(); i++)
			if (in_use(i) && std::exchange(first, first ? first : stores_[i].get()))
				others.push_back(i);
		if (!first)
			return none_left();
		if (!others.empty())
			if (status s = leave_out_lost(others); !s)
				return s;
		return first->accept_loss();
	}
	status discard(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		const std::shared_lock guard = writing();

		return each(true, [&](store &s) { return s.discard(offset, size); });
	}
	status attach(std::span<std::byte> frames) noexcept override
	{
		for (std::size_t i = 0; i < stores_.size(); i++)
			if (status s = stores_[i]->attach(frames); !s) {
				while (i--)
					stores_[i]->detach(frames);
				return s;
			}
		return {};
	}
	void detach(std::span<std::byte> frames) noexcept override
	{
		for (const auto &s : stores_)
			s->detach(frames);
	}

	[[nodiscard]] std::vector<error> left_out() const override
	{
		const std::lock_guard guard(mutex_);

		return whys_;
	}

	status resync() override
	{
		const std::lock_guard one(resync_);

		for (std::size_t i = 0; i < stores_.size(); i++)
			if (!in_use(i))
				if (status s = catch_up(i); !s)
					return s;
		return {};
	}

private:
	static std::uint64_t some_tag()
	{
		std::random_device random;

		return static_cast<std::uint64_t>(random()) << 32 | random();
	}
	static status none_left() { return error{EIO, "mirror: no store is left"}; }
	static status superseded()
	{
		return error{EREMCHG, "mirror: another client wrote to one of the stores while this one was "
				      "away; what this one has may be old"};
	}

	/* acquire: pairs with leave_out(), and with catch_up() */
	[[nodiscard]] role role_of(std::size_t i) const noexcept
	{
		return roles_[i].load(std::memory_order_acquire);
	}
	[[nodiscard]] bool in_use(std::size_t i) const noexcept { return role_of(i) == role::in_use; }
	[[nodiscard]] bool alone(std::size_t i) const noexcept
	{
		for (std::size_t k = 0; k < stores_.size(); k++)
			if (k != i && in_use(k))
				return false;
		return true;
	}

	/* Many write at once; one who copies, and waits for them, is let in before those that come later. */
	[[nodiscard]] std::shared_lock<std::shared_mutex> writing()
	{
		const std::lock_guard turn(turn_);

		return std::shared_lock(copying_);
	}

	void see(const status &s) noexcept
	{
		/* relaxed: it is for good */
		if (!s && s.code() == EREMCHG)
			superseded_.store(true, std::memory_order_relaxed);
	}

	void set_behind(std::size_t i, error why)
	{
		whys_[i] = std::move(why);
		/* release: what is only in the others comes after */
		roles_[i].store(role::behind, std::memory_order_release);
	}

	status leave_out_lost(const std::vector<std::size_t> &which)
	{
		return leave_out(which, {ENOTRECOVERABLE, "mirror: it may have lost what was written to it"});
	}
	/* From now on, for everybody who makes a mirror of these stores. */
	status leave_out(std::vector<std::size_t> which, const error &why)
	{
		const std::lock_guard guard(mutex_);
		const data_generation next = {now_.number + 1, some_tag()};
		bool any_in_use = false, advanced = false;
		status last = why;

		for (const std::size_t i : which)
			any_in_use |= in_use(i);
		if (any_in_use) {
			for (std::size_t i = 0; i < stores_.size(); i++) {
				if (!in_use(i) || std::find(which.begin(), which.end(), i) != which.end())
					continue;
				if (status s = stores_[i]->set_generation(next); s) {
					advanced = true;
				} else {
					see(s);
					last = s;
					which.push_back(i);
				}
			}
			/* Nobody is behind another. */
			if (!advanced)
				return last;
			now_ = next;
		}
		for (const std::size_t i : which)
			if (role_of(i) != role::behind)
				set_behind(i, why);
		return {};
	}

	template <class F> status each(bool changes, F f)
	{
		status last = none_left();
		std::vector<std::size_t> bad;
		bool one = false;

		for (std::size_t i = 0; i < stores_.size(); i++) {
			const role r = role_of(i);

			if (r == role::behind || (r == role::catching && !changes))
				continue;
			if (status s = f(*stores_[i]); s) {
				one |= r == role::in_use;
			} else {
				see(s);
				bad.push_back(i);
				last = s;
			}
		}
		if (superseded_.load(std::memory_order_relaxed))
			return superseded();
		if (!one)
			return last; /* nobody is behind another */
		return bad.empty() ? status{} : leave_out(bad, last.why());
	}

	/* A part at a time, with what is written meanwhile before it or behind it. */
	status catch_up(std::size_t i)
	{
		store &to = *stores_[i];
		std::vector<std::byte> part(copy_bytes);

		/* All of it is written again: what it may have lost, as is seen when it is asked, is no
		 * matter. */
		(void)to.flush();
		if (!to.intact())
			if (status s = to.accept_loss(); !s)
				return s;
		{
			const std::lock_guard turn(turn_);
			const std::unique_lock guard(copying_);
			roles_[i].store(role::catching, std::memory_order_release);
		}
		const auto fails = [&](const status &s) {
			const std::lock_guard guard(mutex_);

			if (role_of(i) != role::behind)
				set_behind(i, s.why());
			return s;
		};
		for (std::uint64_t at = 0; at < bytes(); at += copy_bytes) {
			const std::lock_guard turn(turn_);
			const std::unique_lock guard(copying_);
			const piece p = {at, std::span(part).first(static_cast<std::size_t>(
						 std::min<std::uint64_t>(copy_bytes, bytes() - at)))};

			if (status s = read(p); !s)
				return fails(s);
			if (status s = to.write(p); !s)
				return fails(s);
		}
		/* Most of it. A flush() of the mirror does not ask this store yet, and says that what came
		 * meanwhile is durable. */
		if (status s = to.flush(); !s)
			return fails(s);
		const std::lock_guard turn(turn_);
		const std::unique_lock nobody_writes(copying_);
		if (status s = to.flush(); !s)
			return fails(s);
		/* What was read may be older than what was written, and then this store would be the proof
		 * that it is not. */
		for (std::size_t j = 0; j < stores_.size(); j++)
			if (in_use(j) && !stores_[j]->intact())
				return fails(error{ENOTRECOVERABLE,
						   "what it was to be made equal to has lost writes"});
		const std::lock_guard guard(mutex_);
		if (role_of(i) == role::behind)
			return whys_[i];
		if (status s = to.set_generation(now_); !s) {
			set_behind(i, s.why());
			return s;
		}
		whys_[i] = {0, {}};
		roles_[i].store(role::in_use, std::memory_order_release);
		return {};
	}

	const std::vector<std::shared_ptr<store>> stores_;
	std::vector<std::atomic<role>> roles_;
	std::atomic<std::size_t> first_ = 0; /* to be read from; the last one that answered */
	std::atomic<bool> superseded_ = false;

	std::mutex resync_; /* one at a time */
	std::mutex turn_;   /* to take the next one */
	std::shared_mutex copying_;
	mutable std::mutex mutex_; /* of what follows, and to change roles; taken last */
	std::vector<error> whys_;
	data_generation now_; /* of those in use */
};

} // namespace

result<std::shared_ptr<mirrored>> mirror_store(std::vector<std::shared_ptr<store>> stores)
{
	if (stores.empty())
		return error{EINVAL, "mirror: no stores"};
	for (const auto &s : stores)
		if (!s || s->bytes() != stores[0]->bytes())
			return error{EINVAL, "mirror: the stores are not of one size"};
	auto m = std::make_shared<mirror>(std::move(stores));
	if (status s = m->start(); !s)
		return s.why();
	return std::shared_ptr<mirrored>(std::move(m));
}

} // namespace nprdma::far
