// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "nprdma/sync/synchroniser.hpp"

#include "members.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <stdexcept>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace nprdma::sync
{
namespace
{

/* Where each thing starts, so that no two are in one cache line. */
constexpr std::size_t line = 64;

constexpr std::size_t up_to(std::size_t n, std::size_t multiple) noexcept
{
	return (n + multiple - 1) / multiple * multiple;
}

/* Anonymous memory: zeros, and nothing of it there until it is touched. */
class reserved_memory
{
public:
	explicit reserved_memory(std::size_t bytes) : bytes_(bytes)
	{
		void *const p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			throw std::system_error(errno, std::generic_category(),
						std::to_string(bytes) + " bytes for parameters and inboxes");
		memory_ = static_cast<std::byte *>(p);
	}
	~reserved_memory() { ::munmap(memory_, bytes_); }
	reserved_memory(const reserved_memory &) = delete;
	reserved_memory &operator=(const reserved_memory &) = delete;

	[[nodiscard]] std::span<std::byte> all() const noexcept { return {memory_, bytes_}; }

private:
	std::byte *memory_;
	std::size_t bytes_;
};

/* How much a worker's parameters are worth: only those of the highest standing in a group are averaged. */
enum class standing : std::uint32_t {
	fresh, /* of a process that was started again */
	late,  /* of one that was left out for a time */
	current,
};

struct range {
	std::size_t first = 0, count = 0;
};

/* Part @i of @parts of @whole, cut where blocks of the wire format begin, so some may be empty. */
range share(range whole, std::size_t parts, std::size_t i) noexcept
{
	const std::size_t blocks = (whole.count + wire_block - 1) / wire_block;
	const auto at = [&](std::size_t n) {
		/* Not blocks * n / parts, which could overflow. */
		return std::min(whole.count, (blocks / parts * n + blocks % parts * n / parts) * wire_block);
	};
	return {whole.first + at(i), at(i + 1) - at(i)};
}

/*
 * The memory of each worker, the same for all:
 *   parameters | exchanged | before | pieces going out | means going out | inboxes
 * "exchanged" and "before" are the copies that start() makes. There is an inbox for each worker: for its
 * pieces and for its means, of odd and of even steps. Only that worker writes there, so one that was left out
 * and does not know it yet spoils nobody else's. An all-reduce, for which nobody is left out, takes the two
 * for pieces as one.
 */
struct memory_layout {
	std::size_t vector, staging, slot, all;

	memory_layout(std::size_t elements, std::size_t element_bytes, std::uint32_t workers)
	{
		const std::size_t most = std::numeric_limits<std::size_t>::max() / 64;
		if (!elements || elements > most / element_bytes / (workers + 4))
			throw std::invalid_argument(
			    "synchroniser: " + std::to_string(elements) + " parameters of " +
			    std::to_string(workers) +
			    " workers are none, or more than memory has addresses for");
		vector = up_to(elements * element_bytes, 4096);
		/* A quantised vector is smaller, even if each share begins a line of its own. */
		staging = up_to(elements * element_bytes + std::size_t{workers} * 2 * line, 4096);
		/* The largest share is that of a group of two, up to a block. */
		slot = up_to((elements / 2 + wire_block) * element_bytes, 4096);
		all = inbox(workers, 0, 0);
	}
	[[nodiscard]] std::size_t exchanged() const noexcept { return vector; }
	[[nodiscard]] std::size_t before() const noexcept { return 2 * vector; }
	[[nodiscard]] std::size_t pieces() const noexcept { return 3 * vector; }
	[[nodiscard]] std::size_t means() const noexcept { return 3 * vector + staging; }
	[[nodiscard]] std::size_t inbox(rank_t from, bool mean, std::uint64_t step) const noexcept
	{
		return 3 * vector + 2 * staging + (std::size_t{from} * 4 + (mean ? 2 : 0) + step % 2) * slot;
	}
};

std::uint64_t sum_of_text(std::string_view text) noexcept
{
	return checksum(std::as_bytes(std::span(text.data(), text.size())));
}

std::uint64_t new_birth()
{
	std::random_device d;
	return std::uint64_t{d()} << 32 | d();
}

transport::error failure(int code, std::string text)
{
	return {code, std::move(text)};
}

} // namespace

transport::options link_options(transport::options how)
{
	/* Notes and greetings; who is slow gets no more than some dozens of notes ahead of it. */
	how.max_message = 256;
	how.messages = 64;
	return how;
}

template <class T> class synchroniser<T>::body
{
public:
	body(transport::context &context, transport::listener &listener, rank_t rank,
	     std::vector<std::string> addresses, schedule who, std::size_t elements, const settings &how)
	    : how_(how),
	      who_(std::move(who)),
	      elements_(elements),
	      layout_(elements, sizeof(T), who_.workers()),
	      memory_(layout_.all),
	      region_(registered(context)),
	      members_(context, listener, std::move(addresses), *region_, greeting(rank), how.deadline)
	{
		const clock::time_point until = clock::now() + how.founding;

		if (how.format != wire::exact)
			carried_.resize(elements);
		if (how.comes_back)
			members_.find(until);
		else
			members_.found(until);
		standing_.assign(how.parts, how.comes_back ? standing::fresh : standing::current);
		thread_ = std::thread([this] { run(); });
	}

	~body()
	{
		{
			const std::lock_guard guard(mutex_);
			stop_ = true;
		}
		changed_.notify_all();
		thread_.join();
	}

	[[nodiscard]] std::span<T> vector_at(std::size_t offset) const noexcept
	{
		/* The memory is aligned to pages, and has nothing but numbers there. */
		return {reinterpret_cast<T *>(memory_.all().data() + offset), elements_};
	}
	[[nodiscard]] std::span<T> parameters() const noexcept { return vector_at(0); }

	transport::result<report> synchronise(std::optional<range> asked)
	{
		if (started_)
			return failure(EBUSY, "synchronise: what start() began is not finished");
		return step(parameters(), asked);
	}

	transport::result<void> start()
	{
		if (started_)
			return failure(EBUSY, "start: what start() began is not finished");
		const std::span<T> now = parameters();
		std::copy(now.begin(), now.end(), vector_at(layout_.exchanged()).begin());
		std::copy(now.begin(), now.end(), vector_at(layout_.before()).begin());
		started_ = true;
		{
			const std::lock_guard guard(mutex_);
			result_.reset();
			asked_ = true;
		}
		changed_.notify_all();
		return {};
	}

	transport::result<report> finish()
	{
		if (!started_)
			return failure(EINVAL, "finish: there was no start()");
		std::unique_lock lock(mutex_);
		changed_.wait(lock, [&] { return result_.has_value(); });
		started_ = false;
		const auto result = *result_;
		lock.unlock();

		const std::span<T> now = parameters(), before = vector_at(layout_.before()),
				   after = vector_at(layout_.exchanged());
		for (std::size_t i = 0; i < elements_; ++i)
			if (after[i] != before[i]) /* the same infinity, too */
				now[i] += after[i] - before[i];
		return result;
	}

	transport::result<void> all_reduce(algorithm how);

	members &workers() noexcept { return members_; }
	[[nodiscard]] const members &workers() const noexcept { return members_; }
	[[nodiscard]] std::uint32_t count() const noexcept { return who_.workers(); }
	[[nodiscard]] std::span<const T> carried() const noexcept { return carried_; }
	[[nodiscard]] statistics stats() const noexcept
	{
		return {members_.lines().bytes_sent(), members_.suspicions(), members_.returns(),
			static_cast<std::uint32_t>(teams_.size()), discarded_};
	}

private:
	/* A group's members that take part. */
	struct team {
		std::vector<rank_t> ranks;
		std::vector<std::uint32_t> weights;
		std::size_t self = 0; /* its place */
		std::uint64_t view = 0, epoch = 0;
	};

	std::unique_ptr<transport::region> registered(transport::context &context)
	{
		auto r = context.register_memory(
		    memory_.all(), {.remote_read = false, .remote_write = true, .pinned = how_.pinned});
		if (!r)
			throw std::system_error(r.code(), std::generic_category(), r.why().text);
		return std::move(*r);
	}

	hello greeting(rank_t rank)
	{
		if (rank >= who_.workers())
			throw std::invalid_argument("synchroniser: worker " + std::to_string(rank) + " of " +
						    std::to_string(who_.workers()));
		if (how_.parts < 1 || how_.deadline <= std::chrono::nanoseconds(0))
			throw std::invalid_argument(
			    "synchroniser: the parameters in 0 parts, or no deadline");
		hello h;
		h.common = {elements_,
			    sizeof(T),
			    static_cast<std::uint32_t>(how_.format),
			    sum_of_text(who_.name()) + how_.parts,
			    who_.workers(),
			    how_.checksums};
		h.birth = new_birth();
		h.memory = region_->remote();
		h.rank = rank;
		return h;
	}

	/* What start() asked for; its mutex orders all that both threads touch. */
	void run()
	{
		std::unique_lock lock(mutex_);
		for (;;) {
			changed_.wait(lock, [&] { return asked_ || stop_; });
			if (!asked_)
				return;
			asked_ = false;
			lock.unlock();
			auto r = step(vector_at(layout_.exchanged()), std::nullopt);
			lock.lock();
			result_.emplace(std::move(r));
			changed_.notify_all();
		}
	}

	const team &team_of(std::uint64_t round)
	{
		const grouping now = who_.at(round);
		const group &g = now.of(members_.self());
		team t;

		for (std::size_t i = 0; i < g.members.size(); ++i)
			if (members_.takes_part(g.members[i])) {
				t.ranks.push_back(g.members[i]);
				t.weights.push_back(g.weight(i));
			}
		team &known = teams_[{t.ranks, t.weights}];
		if (known.ranks.empty()) {
			t.self = static_cast<std::size_t>(
			    std::find(t.ranks.begin(), t.ranks.end(), members_.self()) - t.ranks.begin());
			known = std::move(t);
		}
		if (!known.view || known.epoch != members_.epoch()) {
			known.view = members_.view_of(known.ranks);
			known.epoch = members_.epoch();
		}
		return known;
	}

	transport::result<report> step(std::span<T> x, std::optional<range> asked);
	transport::result<report> exchange(std::span<T> x, range what, const team &t);
	bool post_piece(std::span<T> x, range r, standing own, const team &t, std::size_t to,
			std::size_t &staged);
	struct averaged {
		std::uint64_t weights = 0; /* of all together */
		std::uint32_t contributed = 0;
		standing of = standing::fresh;
	};
	averaged average(std::span<T> x, range r, standing own, const team &t);
	template <class F> void each_part_in(range r, F &&f)
	{
		for (std::uint32_t i = 0; i < how_.parts; ++i) {
			const range part = share({0, elements_}, how_.parts, i);
			if (part.first < r.first + r.count && r.first < part.first + part.count)
				f(standing_[i],
				  r.first <= part.first && part.first + part.count <= r.first + r.count);
		}
	}
	/* Is what the note says as it has to be? Then it is @data. */
	bool arrived(const note &n, rank_t from, range expected, std::span<const std::byte> &data);

	[[nodiscard]] std::span<std::byte> memory(std::size_t offset, std::size_t bytes) const noexcept
	{
		return memory_.all().subspan(offset, bytes);
	}
	[[nodiscard]] note noted(note::kind what, range r, const team &t) const noexcept
	{
		note n;
		n.what = what;
		n.step = members_.step();
		n.view = t.view;
		n.first = r.first;
		n.count = r.count;
		return n;
	}

	/* A part of an all-reduce: @r goes to @to, into its pieces' inbox or, where @placed, to where it
	 * belongs. */
	void post_part(rank_t to, range r, std::uint64_t number, bool placed);
	void post_part(rank_t to, range r, std::uint64_t number, bool placed, std::uint64_t sum);
	/* As notes have it: 0 without checksums. */
	[[nodiscard]] std::uint64_t sum_of(range r) const noexcept
	{
		return how_.checksums ? checksum(memory(r.first * sizeof(T), r.count * sizeof(T))) : 0;
	}
	/* Waits for it, and adds it to the parameters, unless it was placed. */
	bool take_part(rank_t from, range r, std::uint64_t number, bool placed);
	bool ring(std::uint64_t &number);
	bool halving_doubling(std::uint64_t &number);
	bool direct(std::uint64_t &number);

	const settings how_;
	const schedule who_;
	const std::size_t elements_;
	const memory_layout layout_;
	const reserved_memory memory_;
	const std::unique_ptr<transport::region> region_;
	members members_;
	std::map<std::pair<std::vector<rank_t>, std::vector<std::uint32_t>>, team> teams_;
	std::vector<T> carried_, sum_, lost_;
	std::vector<standing> standing_; /* of each part */
	std::uint64_t discarded_ = 0;
	std::uint64_t reductions_ = 0; /* all-reduces begun so far, by each worker as many */

	bool started_ = false;
	std::mutex mutex_; /* of what follows */
	std::condition_variable changed_;
	bool asked_ = false, stop_ = false;
	std::optional<transport::result<report>> result_;
	std::thread thread_;
};

template <class T>
transport::result<report> synchroniser<T>::body::step(std::span<T> x, std::optional<range> asked)
{
	const std::uint32_t returns = members_.returns();
	const std::uint64_t number = members_.begin();
	if (members_.returns() != returns)
		for (standing &s : standing_)
			s = std::min(s, standing::late);
	const range part = share({0, elements_}, how_.parts, (number - 1) % how_.parts);
	const team &t = team_of((number - 1) / how_.parts);
	auto result = exchange(x, asked.value_or(part), t);

	members_.end();
	return result;
}

template <class T>
bool synchroniser<T>::body::post_piece(std::span<T> x, range r, standing own, const team &t, std::size_t to,
				       std::size_t &staged)
{
	const std::size_t bytes = wire_bytes<T>(how_.format, r.count);
	const std::span<T> values = x.subspan(r.first, r.count);
	note n = noted(note::kind::piece, r, t);
	std::span<const std::byte> data;

	n.weight = t.weights[t.self];
	n.standing = static_cast<std::uint32_t>(own);
	if (how_.format == wire::exact) {
		data = std::as_bytes(values);
	} else {
		const std::span<std::byte> out = memory(layout_.pieces() + staged, bytes);
		const std::span<T> carried = std::span(carried_).subspan(r.first, r.count);

		staged += up_to(bytes, line);
		for (std::size_t i = 0; i < r.count; ++i)
			carried[i] += values[i];
		if (!encode<T>(how_.format, carried, carried, out))
			return false;
		data = out;
	}
	if (how_.checksums)
		n.sum = checksum(data);
	members_.lines().post(t.ranks[to], data, layout_.inbox(members_.self(), false, n.step), n);
	return true;
}

template <class T>
bool synchroniser<T>::body::arrived(const note &n, rank_t from, range expected,
				    std::span<const std::byte> &data)
{
	const bool mean = n.what == note::kind::mean;

	data = memory(layout_.inbox(from, mean, n.step), wire_bytes<T>(how_.format, expected.count));
	if (n.first == expected.first && n.count == expected.count && n.weight &&
	    n.standing <= static_cast<std::uint32_t>(standing::current) &&
	    (!how_.checksums || n.sum == checksum(data)))
		return true;
	++discarded_;
	return false;
}

/* The mean of @r to sum_. */
template <class T>
auto synchroniser<T>::body::average(std::span<T> x, range r, standing own, const team &t) -> averaged
{
	averaged a{.of = own};

	sum_.assign(r.count, T(0));
	for (const rank_t p : t.ranks)
		if (const note *const n = p == members_.self() ? nullptr : members_.piece(p, t.view))
			a.of =
			    std::max(a.of, std::min(static_cast<standing>(n->standing), standing::current));
	/* In the order of the ranks, so that the result does not depend on who was first. */
	for (std::size_t i = 0; i < t.ranks.size(); ++i) {
		/* The schedule's weight: what a peer says is not needed. */
		const std::uint32_t weight = t.weights[i];

		if (i == t.self) {
			if (own != a.of)
				continue;
			if (carried_.empty())
				for (std::size_t k = 0; k < r.count; ++k)
					sum_[k] += static_cast<T>(weight) * x[r.first + k];
			else
				for (std::size_t k = 0; k < r.count; ++k)
					sum_[k] +=
					    static_cast<T>(weight) *
					    (x[r.first + k] + std::exchange(carried_[r.first + k], T(0)));
		} else {
			const note *const n = members_.piece(t.ranks[i], t.view);
			std::span<const std::byte> data;
			if (!n || n->standing != static_cast<std::uint32_t>(a.of) ||
			    !arrived(*n, t.ranks[i], r, data) ||
			    !add_decoded<T>(how_.format, data, static_cast<T>(weight), sum_))
				continue;
		}
		a.weights += weight;
		++a.contributed;
	}
	for (T &s : sum_)
		s /= static_cast<T>(std::max<std::uint64_t>(a.weights, 1));
	return a;
}

template <class T>
transport::result<report> synchroniser<T>::body::exchange(std::span<T> x, range what, const team &t)
{
	report told{members_.step(), static_cast<std::uint32_t>(t.ranks.size()), 1, true, false};
	const std::size_t g = t.ranks.size();

	if (g == 1)
		return told;
	const auto disagrees = [&](rank_t p) { return members_.disagrees(p, t.view); };
	const auto share_of = [&](std::size_t i) { return share(what, g, i); };
	const range own = share_of(t.self);
	const auto not_finite = [&] {
		return failure(EDOM, "step " + std::to_string(told.step) +
					 ": a parameter is not finite, and cannot be sent as integers");
	};
	standing worth = standing::current;
	each_part_in(what, [&](standing s, bool) { worth = std::min(worth, s); });

	/* All of it before any of it is sent; and all of it, because a loop that may end early is a slow one.
	 */
	if (!carried_.empty()) {
		bool finite = true;

		for (std::size_t i = what.first; i < what.first + what.count; ++i)
			finite &=
			    std::abs(x[i] + carried_[i]) <= static_cast<T>(std::numeric_limits<float>::max());
		if (!finite)
			return not_finite();
	}

	/* Each begins with the one after it, so that not all write to the same one. */
	std::size_t staged = 0;
	for (std::size_t k = 1; k < g; ++k) {
		const std::size_t to = (t.self + k) % g;
		if (!post_piece(x, share_of(to), worth, t, to, staged))
			return not_finite();
	}
	members_.await(t.ranks, [&](rank_t p) { return !members_.piece(p, t.view) && !disagrees(p); });

	/* The mean; each member, and this one too, takes what travels. */
	const averaged a = average(x, own, worth, t);
	const std::span<T> x_own = x.subspan(own.first, own.count);
	std::span<const std::byte> out;
	note n = noted(note::kind::mean, own, t);
	n.weight = a.weights ? 1 : 0;
	n.standing = static_cast<std::uint32_t>(a.of);
	if (a.weights) {
		if (how_.format == wire::exact) {
			std::copy(sum_.begin(), sum_.end(), x_own.begin());
			out = std::as_bytes(x_own);
		} else {
			const auto encoded = memory(layout_.means(), wire_bytes<T>(how_.format, own.count));

			lost_.resize(own.count);
			if (!encode<T>(how_.format, sum_, lost_, encoded) ||
			    !decode<T>(how_.format, encoded, x_own))
				return not_finite();
			/* Each of the members lacks it. */
			for (std::size_t i = 0; i < own.count; ++i)
				carried_[own.first + i] += static_cast<T>(a.contributed) * lost_[i];
			out = encoded;
		}
		if (how_.checksums)
			n.sum = checksum(out);
	}
	for (std::size_t k = 1; k < g; ++k) {
		const rank_t peer = t.ranks[(t.self + k) % g];
		if (members_.takes_part(peer) && !disagrees(peer))
			members_.lines().post(peer, out, layout_.inbox(members_.self(), true, n.step), n);
	}
	members_.await(t.ranks, [&](rank_t p) { return !members_.mean(p, t.view) && !disagrees(p); });

	told.contributed = a.contributed;
	told.complete = a.weights != 0;
	worth = a.of;
	for (std::size_t i = 0; i < g; ++i) {
		const range r = share_of(i);
		if (i == t.self || !r.count)
			continue;
		const note *const m = members_.mean(t.ranks[i], t.view);
		std::span<const std::byte> data;
		if (!m || !arrived(*m, t.ranks[i], r, data) ||
		    !decode<T>(how_.format, data, x.subspan(r.first, r.count)))
			told.complete = false;
		else
			worth = std::min(worth, static_cast<standing>(m->standing));
	}
	members_.drain(t.ranks);
	told.left_out = members_.left_out();
	if (told.complete)
		each_part_in(what, [&](standing &s, bool whole) { s = whole ? std::max(s, worth) : s; });
	return told;
}

template <class T>
void synchroniser<T>::body::post_part(rank_t to, range r, std::uint64_t number, bool placed)
{
	post_part(to, r, number, placed, sum_of(r));
}

template <class T>
void synchroniser<T>::body::post_part(rank_t to, range r, std::uint64_t number, bool placed,
				      std::uint64_t sum)
{
	const auto data = memory(r.first * sizeof(T), r.count * sizeof(T));
	note n;

	n.what = note::kind::part;
	n.view = number;
	n.first = r.first;
	n.count = r.count;
	n.sum = sum;
	members_.lines().post(
	    to, data, (placed ? 0 : layout_.inbox(members_.self(), false, 0)) + r.first * sizeof(T), n);
}

template <class T>
bool synchroniser<T>::body::take_part(rank_t from, range r, std::uint64_t number, bool placed)
{
	std::optional<note> n;
	const rank_t one[] = {from};

	/* It may be there, and itself wait for somebody who is not: then it says so. */
	members_.await(one, [&](rank_t) {
		return !n && !(n = members_.take_part(from, number)) && !members_.failed(number >> 32);
	});
	/* It may have said it before it ended. */
	if (!n)
		n = members_.take_part(from, number);
	if (!n || n->first != r.first || n->count != r.count)
		return false;
	const auto data =
	    memory((placed ? 0 : layout_.inbox(from, false, 0)) + r.first * sizeof(T), r.count * sizeof(T));
	if (how_.checksums && n->sum != checksum(data)) {
		++discarded_;
		return false;
	}
	return placed || add_decoded<T>(wire::exact, data, T(1), parameters().subspan(r.first, r.count));
}

/* In 2 (N - 1) steps, to the right only; each sends and receives 2 (N - 1) / N of the parameters. */
template <class T> bool synchroniser<T>::body::ring(std::uint64_t &number)
{
	const std::size_t n = count(), self = members_.self();
	const auto right = static_cast<rank_t>((self + 1) % n),
		   left = static_cast<rank_t>((self + n - 1) % n);
	const auto chunk = [&](std::size_t i) { return share({0, elements_}, n, i % n); };

	for (std::size_t s = 0; s + 1 < n; ++s) {
		post_part(right, chunk(self + n - s), ++number, false);
		if (!take_part(left, chunk(self + 2 * n - s - 1), number, false))
			return false;
	}
	const range own = chunk(self + 1);
	for (T &x : parameters().subspan(own.first, own.count))
		x /= static_cast<T>(n);
	for (std::size_t s = 0; s + 1 < n; ++s) {
		post_part(right, chunk(self + 1 + n - s), ++number, true);
		if (!take_part(left, chunk(self + n - s), number, true))
			return false;
	}
	return true;
}

/*
 * In 2 log2(N) steps; with each partner half as much as with the one before, and back. If N is no power of
 * two, those above the largest one give all of theirs to another one first, and take the result from it.
 */
template <class T> bool synchroniser<T>::body::halving_doubling(std::uint64_t &number)
{
	const rank_t n = count(), self = members_.self(), power = std::bit_floor(n);
	const range all{0, elements_};
	const std::uint64_t first = number;
	const auto steps = static_cast<std::uint32_t>(std::countr_zero(power));
	std::vector<range> halves{all};

	number += 2 + 2 * std::uint64_t{steps};
	if (self >= power) {
		post_part(self - power, all, first + 1, false);
		return take_part(self - power, all, first + 2, true);
	}
	if (self + power < n && !take_part(self + power, all, first + 1, false))
		return false;
	for (std::uint32_t s = 0; s < steps; ++s) {
		const rank_t bit = power >> (s + 1), partner = self ^ bit;
		const bool upper = self & bit;
		const range mine = share(halves.back(), 2, upper), theirs = share(halves.back(), 2, !upper);

		post_part(partner, theirs, first + 3 + s, false);
		if (!take_part(partner, mine, first + 3 + s, false))
			return false;
		halves.push_back(mine);
	}
	for (T &x : parameters().subspan(halves.back().first, halves.back().count))
		x /= static_cast<T>(n);
	for (std::uint32_t s = steps; s-- > 0;) {
		const rank_t bit = power >> (s + 1), partner = self ^ bit;

		post_part(partner, halves[s + 1], first + 3 + steps + s, true);
		if (!take_part(partner, share(halves[s], 2, !(self & bit)), first + 3 + steps + s, true))
			return false;
	}
	if (self + power < n)
		post_part(self + power, all, first + 2, true);
	return true;
}

/* In 2 steps, each with N - 1 messages: what a group does, with all, and the means where they belong. */
template <class T> bool synchroniser<T>::body::direct(std::uint64_t &number)
{
	const rank_t n = count(), self = members_.self();
	const auto chunk = [&](rank_t i) { return share({0, elements_}, n, i); };
	const range own = chunk(self);

	number += 2;
	for (rank_t k = 1; k < n; ++k)
		post_part((self + k) % n, chunk((self + k) % n), number - 1, false);
	for (rank_t k = 1; k < n; ++k)
		if (!take_part((self + k) % n, own, number - 1, false))
			return false;
	for (T &x : parameters().subspan(own.first, own.count))
		x /= static_cast<T>(n);
	const std::uint64_t sum = sum_of(own);
	for (rank_t k = 1; k < n; ++k)
		post_part((self + k) % n, own, number, true, sum);
	for (rank_t k = 1; k < n; ++k)
		if (!take_part((self + k) % n, chunk((self + k) % n), number, true))
			return false;
	return true;
}

template <class T> transport::result<void> synchroniser<T>::body::all_reduce(algorithm how)
{
	if (started_)
		return failure(EBUSY, "all_reduce: what start() began is not finished");
	std::vector<rank_t> all(count());
	for (rank_t i = 0; i < count(); ++i)
		all[i] = i;
	/* Of its parts: also after one that failed, all begin the next one with the same. */
	std::uint64_t number = ++reductions_ << 32;
	const bool done = how == algorithm::ring     ? ring(number)
			  : how == algorithm::direct ? direct(number)
						     : halving_doubling(number);
	members_.drain(all);
	if (!done) {
		members_.fail(reductions_);
		return failure(ECONNRESET,
			       "all_reduce: a worker is absent, late, or has sent what was damaged");
	}
	return {};
}

template <class T>
synchroniser<T>::synchroniser(transport::context &context, transport::listener &listener, rank_t rank,
			      std::vector<std::string> addresses, schedule who, std::size_t elements,
			      const settings &how)
{
	if (addresses.size() != who.workers())
		throw std::invalid_argument("synchroniser: " + std::to_string(addresses.size()) +
					    " addresses for " + std::to_string(who.workers()) + " workers");
	body_ = std::make_unique<body>(context, listener, rank, std::move(addresses), std::move(who),
				       elements, how);
}

template <class T> synchroniser<T>::~synchroniser() = default;
template <class T> std::span<T> synchroniser<T>::parameters() noexcept
{
	return body_->parameters();
}
template <class T> transport::result<report> synchroniser<T>::synchronise() noexcept
{
	return body_->synchronise({});
}

template <class T>
transport::result<report> synchroniser<T>::synchronise(std::size_t first, std::size_t count) noexcept
{
	const std::size_t all = parameters().size();
	if (!count || first > all || count > all - first)
		return failure(EINVAL, "synchronise: " + std::to_string(count) + " parameters from " +
					   std::to_string(first) + " on; there are " + std::to_string(all));
	return body_->synchronise(range{first, count});
}

template <class T> transport::result<void> synchroniser<T>::start() noexcept
{
	return body_->start();
}
template <class T> transport::result<report> synchroniser<T>::finish() noexcept
{
	return body_->finish();
}
template <class T> transport::result<void> synchroniser<T>::all_reduce(algorithm how) noexcept
{
	return body_->all_reduce(how);
}
template <class T> void synchroniser<T>::barrier(std::span<const rank_t> group) noexcept
{
	body_->workers().barrier(group);
}
template <class T> std::uint64_t synchroniser<T>::next_step() const noexcept
{
	return body_->workers().step() + 1;
}
template <class T> std::vector<rank_t> synchroniser<T>::present() const
{
	std::vector<rank_t> all;
	for (rank_t i = 0; i < body_->count(); ++i)
		if (body_->workers().takes_part(i))
			all.push_back(i);
	return all;
}
template <class T> statistics synchroniser<T>::stats() const noexcept
{
	return body_->stats();
}
template <class T> std::span<const T> synchroniser<T>::carried() const noexcept
{
	return body_->carried();
}

template class synchroniser<float>;
template class synchroniser<double>;

} // namespace nprdma::sync
