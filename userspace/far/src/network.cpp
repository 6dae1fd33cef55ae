/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The client's side of a region. A lane is a connection that one thread uses at a time, with memory for pages
 * that are coded; raw pages go from and to the frames themselves.
 *
 * The data of a page is written and done before its entry is: who sees the entry finds the data. An operation
 * that was not done in time ends its connection, because only then is it certain that the adapter leaves the
 * memory alone.
 */
#include "protocol.hpp"

#include "owners.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>

namespace nprdma::far
{

namespace
{

using std::chrono::milliseconds;
using transport::segment;

constexpr std::size_t group = 64;           /* pages of one pass */
constexpr std::size_t write_part = 1 << 16; /* of what is coded: it is sent while the next is coded */
constexpr auto pause = milliseconds(5);     /* between two attempts to connect */

bool all_zeros(std::span<const std::byte> memory) noexcept
{
	return memory[0] == std::byte{0} &&
	       std::memcmp(memory.data(), memory.data() + 1, memory.size() - 1) == 0;
}

struct lane {
	std::unique_ptr<transport::connection> connection;
	transport::mapping memory; /* a page for each of a group, then an entry for each */
	std::unique_ptr<transport::region> region;
	transport::token data{}, entries{};
	std::uint64_t operation = 0;
	std::uint64_t verifier = 0; /* of the server that it is connected to */
	bool sent = false;          /* a page, and not only zeros where there are zeros */
};

/* See answer::verifier. */
struct stamp {
	std::uint64_t verifier = 0;
	std::uint32_t failures = 0;

	friend bool operator==(const stamp &, const stamp &) = default;
};

class remote final : public network_store
{
public:
	remote(transport::context &context, std::string_view address, const std::string &name,
	       const network_options &how)
	    : context_(context),
	      address_(address),
	      name_(name),
	      how_(how),
	      codec_(how.code, how.error_bound),
	      lanes_(how.lanes)
	{
		std::random_device random;

		client_ = static_cast<std::uint64_t>(random()) << 32 | random();
		for (lane &l : lanes_)
			free_.push_back(&l);
	}

	status start()
	{
		lane &l = lanes_[0];
		const auto deadline = transport::clock::now() + how_.deadline;

		if (status s = connect(l, deadline); !s)
			return s;
		if (plain_)
			return {};
		const std::size_t bytes = (pages() * sizeof(entry) + 4095) / 4096 * 4096;
		transport::descriptor fd(::memfd_create("nprdma-far-entries", MFD_CLOEXEC));
		if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)))
			return transport::failure(errno, "entries of a far region");
		table_memory_ = transport::mapping(fd.get(), bytes);
		if (!table_memory_)
			return transport::failure(errno, "entries of a far region");
		return read_table(l, deadline);
	}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }
	[[nodiscard]] std::size_t page_bytes() const noexcept override { return page_bytes_; }

	status read(const piece &p) noexcept override { return read_many({&p, 1}); }
	status write(const piece &p) noexcept override { return write_many({&p, 1}); }
	status read_many(std::span<const piece> pieces) noexcept override { return all(pieces, false); }
	status write_many(std::span<const piece> pieces) noexcept override
	{
		if (how_.read_only)
			return error{EROFS, "far region \"" + name_ + "\": opened read-only"};
		return all(pieces, true);
	}

	[[nodiscard]] bool written(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		if (how_.shared || plain_)
			return true; /* another one may have, meanwhile */
		for (std::uint64_t page = offset / page_bytes_; page * page_bytes_ < offset + size; page++)
			if (get(page).written())
				return true;
		return false;
	}

	/*
	 * A server that was started anew may have lost what was in its host's page cache, and so has one
	 * whose disk reported an error, which its kernel does once. What was written since the last flush()
	 * is not made durable then by one that goes well, so the error stays.
	 */
	status flush() noexcept override
	{
		std::uint64_t before;

		{
			const std::lock_guard guard(stamps_mutex_);
			before = writes_;
		}
		return with_lane([&](lane &l, transport::clock::time_point deadline) -> status {
			result<answer> a = ask(l, op::flush, deadline);
			const std::lock_guard guard(stamps_mutex_);
			if (lost_.code)
				return lost_;
			if (!a)
				return a.why();
			flushed_ = std::max(flushed_, before);
			return {};
		});
	}

	[[nodiscard]] bool intact() noexcept override
	{
		/* acquire: with lose(); who read from the server after it was started anew sees it */
		return !is_lost_.load(std::memory_order_acquire);
	}

	result<data_generation> generation() noexcept override
	{
		if (how_.shared)
			return error{EINVAL, "far region \"" + name_ +
						 "\": is opened with shared, and nobody could tell the other "
						 "clients in time that one of two servers lacks something"};
		return generation_;
	}

	status set_generation(const data_generation &to) noexcept override
	{
		if (how_.read_only)
			return error{EROFS, "far region \"" + name_ + "\": opened read-only"};
		status s = with_lane([&](lane &l, transport::clock::time_point deadline) -> status {
			result<answer> a = ask(l, op::set_generation, deadline, to);
			return a ? status{} : status(a.why());
		});

		if (s)
			generation_ = to;
		return s;
	}

	/* Pages are what the server has of them from here on: their entries are not what we wrote. */
	status accept_loss() noexcept override
	{
		return with_lane([&](lane &l, transport::clock::time_point deadline) -> status {
			if (!plain_ && !how_.shared) {
				const std::unique_lock nobody_writes(table_mutex_);
				if (status s = read_table(l, deadline); !s)
					return s;
			}
			const std::lock_guard guard(stamps_mutex_);
			lost_ = {};
			is_lost_.store(false, std::memory_order_relaxed);
			unflushed_ = heard_;
			return {};
		});
	}

	status discard(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		const std::uint64_t first = (offset + page_bytes_ - 1) / page_bytes_;
		const std::uint64_t end = offset + size == bytes_ ? pages() : (offset + size) / page_bytes_;

		if (how_.read_only || plain_ || first >= end)
			return {};
		return with_lane([&](lane &l, transport::clock::time_point deadline) -> status {
			const stamp now = begin_write(l);
			const std::uint64_t most = lane_bytes() / sizeof(entry);

			std::memset(slot(l, 0), 0, std::min(most, end - first) * sizeof(entry));
			for (std::uint64_t page = first; page < end; page += most) {
				const std::uint64_t n = std::min(end - page, most);
				const std::shared_lock no_other_table(table_mutex_);
				const segment s = {l.region.get(), slot(l, 0),
						   l.entries.addr + page * sizeof(entry), l.entries.key,
						   static_cast<std::uint32_t>(n * sizeof(entry))};
				if (status done = run(l, {&s, 1}, true, deadline); !done)
					return done;
				/* Not before: a page of zeros that is written to what the server has not
				 * discarded is not what is there already. */
				for (std::uint64_t i = 0; i < n; i++)
					set(page + i, {0});
			}
			/* It is lost as other writes are, and zeros were not written because of it. */
			end_write(now);
			return {};
		});
	}

	status attach(std::span<std::byte> frames) noexcept override
	{
		result<std::unique_ptr<transport::region>> r =
		    context_.register_memory(frames, {false, false, false});

		if (!r)
			return r.why();
		const std::unique_lock guard(frames_mutex_);
		frames_.push_back(std::move(*r));
		return {};
	}

	void detach(std::span<std::byte> frames) noexcept override
	{
		const std::unique_lock guard(frames_mutex_);

		std::erase_if(frames_, [&](const auto &r) { return r->memory().data() == frames.data(); });
	}

	[[nodiscard]] network_statistics stats() const noexcept override
	{
		const auto get = [](const auto &x) { return x.load(std::memory_order_relaxed); };

		return {get(count_.bytes_read), get(count_.bytes_written), get(count_.coded),
			get(count_.raw),        get(count_.reconnects),    get(count_.checksum_errors)};
	}

private:
	/* One page of the region, and where it goes: less than all of it only at the end of the region. */
	struct part {
		std::uint64_t page;
		std::span<std::byte> memory;
		const transport::region *region; /* nullptr: @memory is not registered */
	};

	[[nodiscard]] std::uint64_t pages() const noexcept
	{
		return (bytes_ + page_bytes_ - 1) / page_bytes_;
	}

	[[nodiscard]] std::atomic_ref<std::uint64_t> word(std::uint64_t page) const noexcept
	{
		return std::atomic_ref(reinterpret_cast<std::uint64_t *>(table_memory_.get())[page]);
	}
	/* relaxed: who reads a page comes after who wrote it by the pager's states */
	[[nodiscard]] entry get(std::uint64_t page) const noexcept
	{
		return {word(page).load(std::memory_order_relaxed)};
	}
	void set(std::uint64_t page, entry e) const noexcept
	{
		word(page).store(e.word, std::memory_order_relaxed);
	}

	/* The entries of the server. Nobody writes meanwhile. */
	status read_table(lane &l, transport::clock::time_point deadline)
	{
		const std::uint64_t most = lane_bytes() / sizeof(entry);

		for (std::uint64_t page = 0; page < pages(); page += most) {
			const std::uint64_t n = std::min(pages() - page, most);
			const segment s = {l.region.get(), slot(l, 0), l.entries.addr + page * sizeof(entry),
					   l.entries.key, static_cast<std::uint32_t>(n * sizeof(entry))};

			if (status done = run(l, {&s, 1}, false, deadline); !done)
				return done;
			for (std::uint64_t i = 0; i < n; i++)
				set(page + i, reinterpret_cast<const entry *>(slot(l, 0))[i]);
		}
		return {};
	}

	/* Before something is written: how durable it may be at best. */
	[[nodiscard]] stamp begin_write(const lane &l)
	{
		const std::lock_guard guard(stamps_mutex_);

		return {l.verifier, l.verifier == heard_.verifier ? heard_.failures : 0};
	}
	/* It is written, and not flushed. */
	void end_write(const stamp &of)
	{
		const std::lock_guard guard(stamps_mutex_);

		if (writes_ == flushed_)
			unflushed_ = of;
		else if (unflushed_ != of)
			lose(of);
		writes_++;
		if (unflushed_ != heard_)
			lose(heard_);
	}
	/* Of an answer about the region. */
	void hear(const answer &a)
	{
		const std::lock_guard guard(stamps_mutex_);

		/* Answers of two lanes may come in another order than they were given in. */
		if (a.verifier == heard_.verifier)
			heard_.failures = std::max(heard_.failures, a.failures);
		else
			heard_ = {a.verifier, a.failures};
		if (writes_ != flushed_ && unflushed_ != heard_)
			lose(heard_);
	}
	/* @to: under what the server is now, or was last. The caller has stamps_mutex_. */
	void lose(const stamp &to)
	{
		lost_ = {ENOTRECOVERABLE,
			 "far region \"" + name_ + "\": " +
			     (unflushed_.verifier != to.verifier
				  ? "the server was started anew"
				  : "the server could not make the region's file durable") +
			     ", and what was written since the last flush() that succeeded may be lost: "
			     "accept_loss(), and write it again"};
		is_lost_.store(true, std::memory_order_release);
	}

	/* The link's errors are tried again until the deadline, on a new connection. */
	template <class F> status with_lane(F f) noexcept
	{
		const auto deadline = transport::clock::now() + how_.deadline;
		lane *l = nullptr;

		{
			std::unique_lock lock(mutex_);
			if (!available_.wait_until(lock, deadline, [&] { return !free_.empty(); }))
				return error{ETIMEDOUT, "far region \"" + name_ +
							    "\": all lanes are in use until the deadline"};
			l = free_.back();
			free_.pop_back();
		}
		status s;
		for (;;) {
			s = l->connection && l->connection->alive() ? status{} : connect(*l, deadline);
			if (s)
				s = f(*l, deadline);
			if (s || !of_link(s.code()) || transport::clock::now() >= deadline)
				break;
			l->connection.reset();
			std::this_thread::sleep_for(pause);
		}
		if (!s && of_link(s.code()))
			l->connection.reset();
		{
			const std::lock_guard guard(mutex_);
			free_.push_back(l);
		}
		available_.notify_one();
		return s;
	}

	static bool of_link(int code) noexcept
	{
		return code == ECONNRESET || code == ECONNREFUSED || code == ETIMEDOUT || code == EBUSY ||
		       code == EPROTO || code == EFAULT || code == EACCES || code == EIO ||
		       code == ENOTCONN ||
		       code == ENOENT; /* a server that was started anew may listen before it lends */
	}

	result<answer> ask(lane &l, op what, transport::clock::time_point deadline,
			   const data_generation &to = {})
	{
		request r{};
		answer a{};

		r.magic = protocol_magic;
		r.what = what;
		r.flags = (how_.read_only ? open_read_only : 0u) | (how_.shared ? open_shared : 0u) |
			  (how_.make_bytes && !bytes_ ? open_make : 0u);
		r.bytes = how_.make_bytes;
		r.page_bytes = how_.page_bytes;
		r.client = client_;
		r.generation = to.number;
		r.tag = to.tag;
		name_.copy(r.name, sizeof(r.name) - 1);
		if (status s = l.connection->send(std::as_bytes(std::span(&r, 1))); !s)
			return s.why();
		auto m = transport::next_message(*l.connection, std::as_writable_bytes(std::span(&a, 1)),
						 deadline);
		if (!m)
			return m.why();
		if (m->size() != sizeof(a) || a.magic != protocol_magic)
			return error{EBADMSG, address_ + " is no far server, or of another version"};
		a.text[sizeof(a.text) - 1] = 0;
		if (a.verifier && what != op::open)
			hear(a);
		if (a.code)
			return error{a.code, a.text};
		return a;
	}

	status connect(lane &l, transport::clock::time_point deadline)
	{
		status s = open_on(l, deadline);

		/* Or the next request would go to what the server has now where our region was. */
		if (!s)
			l.connection.reset();
		return s;
	}

	status open_on(lane &l, transport::clock::time_point deadline)
	{
		l.connection.reset();
		auto c = context_.connect(address_, deadline, protocol_room);
		if (!c)
			return c.why();
		l.connection = std::move(*c);
		result<answer> a = ask(l, op::open, deadline);
		if (!a)
			return a.why();
		const std::uint64_t n = a->page_bytes ? (a->bytes + a->page_bytes - 1) / a->page_bytes : 0;
		if (!a->bytes || a->page_bytes < 4096 || a->page_bytes > 4 << 20 ||
		    a->page_bytes & (a->page_bytes - 1) || a->bytes > 1ULL << 46 ||
		    (a->flags & region_plain
			 ? a->data.length < a->bytes
			 : a->data.length < n * a->page_bytes || a->entries.length < n * sizeof(entry)))
			return error{EBADMSG, address_ + ": the region is not as a server's can be"};
		if (bytes_ && (a->id != id_ || a->bytes != bytes_ || a->page_bytes != page_bytes_))
			return error{ESTALE,
				     "far region \"" + name_ +
					 "\": the server was started anew, and what was there is lost"};
		/*
		 * A server that lost us had the region for others, and what we know of its pages is old: of
		 * this store nothing is right any more. An own lane may have been the last one since, so it
		 * stays so.
		 */
		if (bytes_ && !how_.shared && a->owner && a->owner != owner_)
			superseded_.store(true, std::memory_order_relaxed);
		if (superseded_.load(std::memory_order_relaxed))
			return error{EREMCHG, "far region \"" + name_ +
						  "\": another client wrote to it while this one was away"};
		if (!bytes_) {
			owner_ = how_.read_only ? a->owner : client_;
			generation_ = {a->generation, a->tag};
			id_ = a->id;
			bytes_ = a->bytes;
			page_bytes_ = a->page_bytes;
			plain_ = a->flags & region_plain;
		} else {
			count_.reconnects.fetch_add(l.region != nullptr, std::memory_order_relaxed);
		}
		l.data = a->data;
		l.entries = a->entries;
		l.verifier = a->verifier;
		hear(*a);
		if (l.region)
			return {};
		const std::size_t size = lane_bytes();
		transport::descriptor fd(::memfd_create("nprdma-far-lane", MFD_CLOEXEC));
		if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(size)))
			return transport::failure(errno, "memory of a lane");
		l.memory = transport::mapping(fd.get(), size);
		if (!l.memory)
			return transport::failure(errno, "memory of a lane");
		auto r = context_.register_memory({l.memory.get(), size}, {false, false, false});
		if (!r)
			return r.why();
		l.region = std::move(*r);
		return {};
	}

	/* What one call has under way on its lane. After an error there is no connection, and nothing lands.
	 */
	class flight
	{
	public:
		flight(const remote &r, lane &l, bool write, transport::clock::time_point deadline) noexcept
		    : remote_(r), lane_(l), write_(write), deadline_(deadline)
		{
		}

		/* Returns when all of it is posted. */
		status post(std::span<const segment> segments)
		{
			transport::connection &c = *lane_.connection;

			for (std::size_t at = 0, n; at < segments.size();) {
				if (under_way_ >= c.max_operations()) {
					if (status s = land_one(); !s)
						return s;
					continue;
				}
				n = std::min(segments.size() - at, c.max_segments());
				const auto some = segments.subspan(at, n);
				status s = write_ ? c.write(some, ++lane_.operation)
						  : c.read(some, ++lane_.operation);

				if (s) {
					at += n;
					under_way_++;
				} else if (s.code() != EAGAIN ||
					   (!under_way_ && transport::clock::now() >= deadline_)) {
					lane_.connection.reset();
					return s;
				} else if (!under_way_) {
					/* The kernel may have no memory just now to hold our pages with. */
					std::this_thread::sleep_for(pause);
				} else if (status landed = land_one(); !landed) {
					return landed;
				}
			}
			return {};
		}

		status land()
		{
			while (under_way_)
				if (status s = land_one(); !s)
					return s;
			return {};
		}

	private:
		status land_one()
		{
			const result<transport::completion> c =
			    transport::next_completion(*lane_.connection, deadline_);

			if (c && !c->error) {
				under_way_--;
				return {};
			}
			lane_.connection.reset();
			if (!c)
				return c.why();
			return error{c->error, "far region \"" + remote_.name_ +
						   "\": " + (write_ ? "WRITE" : "READ") + " failed"};
		}

		const remote &remote_;
		lane &lane_;
		const bool write_;
		const transport::clock::time_point deadline_;
		std::size_t under_way_ = 0;
	};

	status run(lane &l, std::span<const segment> segments, bool write,
		   transport::clock::time_point deadline)
	{
		flight f(*this, l, write, deadline);

		if (status s = f.post(segments); !s)
			return s;
		return f.land();
	}

	status all(std::span<const piece> pieces, bool write) noexcept
	{
		std::vector<part> parts;

		{
			const std::shared_lock guard(frames_mutex_);
			for (const piece &p : pieces) {
				const transport::region *in = nullptr;
				const std::size_t size = p.memory.size();

				if (p.offset % page_bytes_ || p.offset > bytes_ || size > bytes_ - p.offset ||
				    (size % page_bytes_ && !plain_ && p.offset + size != bytes_))
					return error{
					    EINVAL, "far region \"" + name_ + "\": pages are of " +
							std::to_string(page_bytes_) +
							" bytes; map it with page_bytes of so many, or more"};
				for (const auto &r : frames_)
					if (p.memory.data() >= r->memory().data() &&
					    p.memory.data() < r->memory().data() + r->memory().size())
						in = r.get();
				for (std::size_t done = 0; done < size; done += page_bytes_)
					parts.push_back(
					    {(p.offset + done) / page_bytes_,
					     p.memory.subspan(done, std::min(page_bytes_, size - done)), in});
			}
		}
		return with_lane([&](lane &l, transport::clock::time_point deadline) -> status {
			const stamp now = begin_write(l);

			l.sent = plain_;
			for (std::size_t at = 0; at < parts.size(); at += group) {
				const auto some =
				    std::span(parts).subspan(at, std::min(group, parts.size() - at));
				if (status s = plain_  ? move_group(l, some, write, deadline)
					       : write ? write_group(l, some, deadline)
						       : read_group(l, some, deadline);
				    !s)
					return s;
			}
			if (write && l.sent)
				end_write(now);
			return {};
		});
	}

	[[nodiscard]] std::size_t lane_bytes() const noexcept
	{
		return group * (page_bytes_ + sizeof(entry));
	}
	[[nodiscard]] std::byte *slot(const lane &l, std::size_t i) const noexcept
	{
		return l.memory.get() + i * page_bytes_;
	}
	[[nodiscard]] entry *entries(const lane &l) const noexcept
	{
		return reinterpret_cast<entry *>(slot(l, group));
	}

	error damaged(std::uint64_t page) const
	{
		/* Not one of the link: to ask again brings the same. */
		return {EUCLEAN, "far region \"" + name_ + "\": page " + std::to_string(page) +
				     " is damaged, or was written by another client"};
	}

	/* Of a region that has no entries. */
	status move_group(lane &l, std::span<const part> parts, bool write,
			  transport::clock::time_point deadline)
	{
		std::vector<segment> segments;
		std::uint64_t bytes = 0;

		for (std::size_t i = 0; i < parts.size(); i++) {
			const part &p = parts[i];

			if (write && !p.region)
				std::memcpy(slot(l, i), p.memory.data(), p.memory.size());
			segments.push_back({p.region ? p.region : l.region.get(),
					    p.region ? p.memory.data() : slot(l, i),
					    l.data.addr + p.page * page_bytes_, l.data.key,
					    static_cast<std::uint32_t>(p.memory.size())});
			bytes += p.memory.size();
		}
		if (status s = run(l, segments, write, deadline); !s)
			return s;
		if (write) {
			count_.bytes_written.fetch_add(bytes, std::memory_order_relaxed);
			count_.raw.fetch_add(parts.size(), std::memory_order_relaxed);
			return {};
		}
		count_.bytes_read.fetch_add(bytes, std::memory_order_relaxed);
		for (std::size_t i = 0; i < parts.size(); i++)
			if (!parts[i].region)
				std::memcpy(parts[i].memory.data(), slot(l, i), parts[i].memory.size());
		return {};
	}

	status read_group(lane &l, std::span<const part> parts, transport::clock::time_point deadline)
	{
		std::vector<segment> segments;
		entry now[group];
		std::uint64_t bytes = 0;

		if (how_.shared) {
			for (std::size_t i = 0; i < parts.size(); i++)
				segments.push_back({l.region.get(),
						    reinterpret_cast<std::byte *>(entries(l) + i),
						    l.entries.addr + parts[i].page * sizeof(entry),
						    l.entries.key, sizeof(entry)});
			if (status s = run(l, segments, false, deadline); !s)
				return s;
			segments.clear();
		}
		for (std::size_t i = 0; i < parts.size(); i++) {
			const part &p = parts[i];
			const entry e = now[i] = how_.shared ? entries(l)[i] : get(p.page);

			if (!e.written())
				continue;
			if (!e.sane(page_bytes_))
				return damaged(p.page);
			/* The last page of a region may be less than the page that is stored. */
			const bool in_place =
			    e.how() == stored::raw && p.region && p.memory.size() == page_bytes_;
			segments.push_back({in_place ? p.region : l.region.get(),
					    in_place ? p.memory.data() : slot(l, i),
					    l.data.addr + p.page * page_bytes_, l.data.key,
					    static_cast<std::uint32_t>(e.bytes())});
			bytes += e.bytes();
		}
		if (!segments.empty())
			if (status s = run(l, segments, false, deadline); !s)
				return s;
		count_.bytes_read.fetch_add(bytes, std::memory_order_relaxed);
		std::vector<std::byte> whole;
		for (std::size_t i = 0; i < parts.size(); i++) {
			const part &p = parts[i];
			const entry e = now[i];

			if (!e.written()) {
				std::memset(p.memory.data(), 0, p.memory.size());
				continue;
			}
			const bool in_place =
			    e.how() == stored::raw && p.region && p.memory.size() == page_bytes_;
			const std::span<const std::byte> got(in_place ? p.memory.data() : slot(l, i),
							     e.bytes());
			if (e.summed() && checksum(got) != e.sum()) {
				count_.checksum_errors.fetch_add(1, std::memory_order_relaxed);
				return damaged(p.page);
			}
			if (in_place)
				continue;
			if (p.memory.size() == page_bytes_) {
				if (!decode(e.how(), got, p.memory))
					return damaged(p.page);
				continue;
			}
			whole.resize(page_bytes_);
			if (!decode(e.how(), got, whole))
				return damaged(p.page);
			std::copy_n(whole.data(), p.memory.size(), p.memory.data());
		}
		return {};
	}

	status write_group(lane &l, std::span<const part> parts, transport::clock::time_point deadline)
	{
		std::vector<segment> segments, table;
		std::uint64_t bytes = 0, coded = 0;
		std::size_t posted = 0, waiting = 0; /* of @segments; bytes of those that are not posted */
		flight data(*this, l, true, deadline);
		/* The link has something to do while the next pages are coded. */
		const auto post = [&] {
			const auto some = std::span(segments).subspan(posted);

			posted = segments.size();
			waiting = 0;
			return data.post(some);
		};

		for (std::size_t i = 0; i < parts.size(); i++) {
			const part &p = parts[i];
			/* Nothing was ever there, and nothing is: it stays so. */
			if (!how_.shared && !get(p.page).written() && all_zeros(p.memory)) {
				entries(l)[i] = {0};
				continue;
			}
			const bool whole = p.memory.size() == page_bytes_;
			stored how = stored::raw;
			std::size_t used =
			    whole ? codec_.encode(p.memory, {slot(l, i), page_bytes_}, how) : 0;
			std::span<const std::byte> from(slot(l, i), used);
			const transport::region *in = l.region.get();

			if (used) {
				coded++;
			} else if (whole && p.region) {
				how = stored::raw;
				from = p.memory;
				in = p.region;
			} else {
				how = stored::raw;
				std::memcpy(slot(l, i), p.memory.data(), p.memory.size());
				std::memset(slot(l, i) + p.memory.size(), 0, page_bytes_ - p.memory.size());
				from = {slot(l, i), page_bytes_};
			}
			const bool summed = how_.checksums || how != stored::raw;
			entries(l)[i] = entry::make(how, from.size(), summed, summed ? checksum(from) : 0);
			segments.push_back({in, const_cast<std::byte *>(from.data()),
					    l.data.addr + p.page * page_bytes_, l.data.key,
					    static_cast<std::uint32_t>(from.size())});
			table.push_back({l.region.get(), reinterpret_cast<std::byte *>(entries(l) + i),
					 l.entries.addr + p.page * sizeof(entry), l.entries.key,
					 sizeof(entry)});
			bytes += from.size();
			waiting += from.size();
			if (waiting >= write_part || segments.size() - posted == l.connection->max_segments())
				if (status s = post(); !s)
					return s;
		}
		const std::size_t written = segments.size();
		if (!written)
			return {};
		l.sent = true;
		if (status s = post(); !s)
			return s;
		if (status s = data.land(); !s)
			return s;
		const std::shared_lock no_other_table(table_mutex_);
		if (status s = run(l, table, true, deadline); !s)
			return s;
		for (std::size_t i = 0; i < parts.size(); i++)
			set(parts[i].page, entries(l)[i]);
		count_.bytes_written.fetch_add(bytes, std::memory_order_relaxed);
		count_.coded.fetch_add(coded, std::memory_order_relaxed);
		count_.raw.fetch_add(written - coded, std::memory_order_relaxed);
		return {};
	}

	transport::context &context_;
	const std::string address_, name_;
	const network_options how_;
	codec codec_;
	std::uint64_t client_ = 0, id_ = 0, bytes_ = 0, owner_ = 0;
	std::size_t page_bytes_ = 0;
	bool plain_ = false; /* no entries, and so no table */
	std::atomic<bool> superseded_ = false;
	data_generation generation_; /* of a mirror, which calls one at a time */
	transport::mapping table_memory_;
	std::shared_mutex table_mutex_; /* shared: to change single entries */

	std::mutex stamps_mutex_; /* of what follows */
	std::uint64_t writes_ = 0, flushed_ = 0;
	stamp heard_, unflushed_; /* of the server, last; of the writes behind @flushed_ */
	error lost_{0, {}};
	std::atomic<bool> is_lost_ = false;

	std::mutex mutex_;
	std::condition_variable available_;
	std::vector<lane> lanes_;
	std::vector<lane *> free_;

	std::shared_mutex frames_mutex_;
	std::vector<std::unique_ptr<transport::region>> frames_;

	struct {
		std::atomic<std::uint64_t> bytes_read = 0, bytes_written = 0, coded = 0, raw = 0,
					   reconnects = 0, checksum_errors = 0;
	} count_;
};

} // namespace

result<std::shared_ptr<network_store>> network_store::open(transport::context &context,
							   std::string_view address,
							   const std::string &region,
							   const network_options &how)
{
	if (region.empty() || region.size() >= sizeof(request::name))
		return error{EINVAL, "far: a region's name has 1 to 95 bytes"};
	if (how.lanes < 1 || how.lanes > 256)
		return error{EINVAL, "far: 1 to 256 lanes"};
	if ((how.code == coding::zfp_64 || how.code == coding::zfp_32) && !(how.error_bound > 0))
		return error{EINVAL, "far: ZFP needs an error_bound above 0"};
	auto s = std::make_shared<remote>(context, address, region, how);
	if (status r = s->start(); !r)
		return r.why();
	return std::shared_ptr<network_store>(std::move(s));
}

} // namespace nprdma::far
