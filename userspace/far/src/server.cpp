/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The server: it opens regions for clients and makes files durable. All else clients do by themselves.
 *
 * The end of a connection waits for what its peer has under way, which a hostile one makes last: up to 5
 * seconds over shared memory. Such a one ends in a thread of its own, and the others are served meanwhile.
 * Until a connection has ended its client has what it opened, because it may still write there.
 *
 * A file is made durable by another thread, as a disk may be slow: who asked for it waits for the answer, and
 * the others are served. Threads know a connection by its number, so that it may end meanwhile.
 */
#include "protocol.hpp"

#include "owners.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace nprdma::far
{

namespace
{

constexpr std::size_t most_made = 1024;     /* regions of clients: each is registered, and mapped */
constexpr std::size_t most_counted = 65536; /* clients of a region, for withdraw_after() */
constexpr int most_at_once = 16; /* questions of one client, after which the others have their turn */

/* The last block of a region's file. It is not registered, so that no client can write to it. */
struct file_mark {
	char magic[8];
	std::uint64_t bytes, page_bytes; /* as lend() was given them */
	std::uint64_t id;
	std::uint64_t generation, tag; /* in one sector with what is before */
	char zeros[4048];
};
static_assert(sizeof(file_mark) == 4096);
constexpr char file_magic[sizeof(file_mark::magic)] = "nprfar1"; /* and version */

std::string size_of(std::uint64_t bytes, std::uint64_t page_bytes)
{
	return std::to_string(bytes) + " bytes in pages of " + std::to_string(page_bytes);
}

/* The file of a region, and of those who make it durable. */
struct lent_file {
	explicit lent_file(transport::descriptor of) noexcept : fd(std::move(of)) {}

	const transport::descriptor fd;
	/*
	 * Times that it could not be made durable: the kernel says so once, and not what was lost. relaxed: a
	 * mutex hands results on
	 */
	std::atomic<std::uint32_t> failures = 0;
};

struct lent {
	~lent()
	{
		data.reset();
		if (memory && !plain)
			(void)::munmap(memory, bytes);
	}

	std::uint64_t id = 0, bytes = 0;
	std::size_t page_bytes = 0, table_bytes = 0; /* entries are behind the data */
	bool plain = false;                          /* the caller's memory, without entries */
	std::byte *memory = nullptr;                 /* of @bytes */
	std::uint64_t verifier = 0;                  /* of this start of the server */
	std::uint64_t generation = 0, tag = 0;       /* see store::generation() */
	std::uint64_t owner = 0;                     /* the client that opened it to write, last */
	std::shared_ptr<lent_file> file;
	std::unique_ptr<transport::region> data;
	std::uint64_t size = 0; /* as the client sees it */
	std::uint64_t made = 0; /* of a client: what counts of it */
	std::vector<std::pair<std::uint64_t, std::uint32_t>>
	    users;                   /* numbers of connections, and how they opened it */
	std::set<std::uint64_t> had; /* if plain: the clients that ever opened it, most_counted of them */
};

struct client {
	std::unique_ptr<transport::connection> connection;
	std::uint64_t number;  /* no other one ever has it */
	bool flushing = false; /* it waits for the answer */
};

/* Of the client of this number, which may be gone. */
struct flush_request {
	std::uint64_t number;
	std::uint64_t verifier;
	std::shared_ptr<lent_file> file;
	bool sets; /* its generation, in the mark that is at @mark_at */
	off_t mark_at;
	std::uint64_t generation, tag;
};
struct flush_result {
	std::uint64_t number, verifier;
	std::uint32_t failures;
	int code; /* 0 or of errno */
	bool sets;
	std::uint64_t generation, tag;
};

class serving final : public server
{
public:
	serving(transport::context &context, std::unique_ptr<transport::listener> listener,
		const server_options &how, transport::descriptor stop, transport::descriptor flushed,
		transport::descriptor events)
	    : context_(context),
	      listener_(std::move(listener)),
	      how_(how),
	      stop_(std::move(stop)),
	      flushed_(std::move(flushed)),
	      events_(std::move(events))
	{
	}
	/* Also after start() has failed: the threads that are there end. */
	~serving() override
	{
		const std::uint64_t one = 1;

		if (thread_.joinable()) {
			(void)!::write(stop_.get(), &one, sizeof(one));
			thread_.join();
		}
		{
			const std::lock_guard guard(ending_mutex_);
			last_ = true;
		}
		more_to_end_.notify_one();
		if (ender_.joinable())
			ender_.join();
		{
			const std::lock_guard guard(flush_mutex_);
			last_flush_ = true;
		}
		more_to_flush_.notify_one();
		if (flusher_.joinable())
			flusher_.join();
	}

	status start()
	{
		try {
			ender_ = std::thread([this] { end(); });
			flusher_ = std::thread([this] { flush(); });
			thread_ = std::thread([this] { serve(); });
		} catch (const std::system_error &e) {
			return transport::failure(e.code().value(), "far server: to start a thread");
		}
		return {};
	}

	status lend(const std::string &name, std::uint64_t bytes, std::size_t page_bytes,
		    const std::string &path) override
	{
		const std::lock_guard guard(mutex_);

		return add(name, bytes, page_bytes, path, false);
	}

	status lend(const std::string &name, std::span<std::byte> memory, std::size_t page_bytes) override
	{
		const std::lock_guard guard(mutex_);

		if (status s = check(name, memory.size(), page_bytes); !s)
			return s;
		auto r = std::make_unique<lent>();
		r->plain = true;
		r->page_bytes = page_bytes;
		r->size = r->bytes = memory.size();
		r->memory = memory.data();
		r->id = some_id();
		return publish(name, std::move(r));
	}

	status withdraw_after(const std::string &name, std::uint64_t clients) override
	{
		if (clients > most_counted)
			return error{EINVAL, "far server: " + std::to_string(most_counted) +
						 " clients of a region are counted"};
		for (;;) {
			{
				std::unique_lock lock(mutex_);

				left_.wait(lock, [&] {
					const auto i = regions_.find(name);

					return i == regions_.end() ||
					       (i->second->users.empty() && i->second->had.size() >= clients);
				});
			}
			/* A client may have come in between. */
			if (status s = withdraw(name); s || s.code() != EBUSY)
				return s;
		}
	}

	void wait_until_left() override
	{
		std::unique_lock lock(mutex_);

		left_.wait(lock, [&] { return anybody_ && !connected_; });
	}

	status withdraw(const std::string &name) override
	{
		/* Its end waits for whoever copies, from and to whatever region, and others do not wait for
		 * that. */
		std::unique_ptr<lent> gone;
		const std::lock_guard guard(mutex_);
		const auto i = regions_.find(name);

		if (i == regions_.end())
			return error{ENOENT, "far server: no region \"" + name + "\""};
		/* Also one that is being made durable for a client that is gone: its file is locked until
		 * then. */
		if (!i->second->users.empty() || i->second->file.use_count() > 1)
			return error{EBUSY, "far server: region \"" + name + "\" is in use"};
		made_ -= i->second->made;
		made_regions_ -= i->second->made != 0;
		gone = std::move(i->second);
		regions_.erase(i);
		return {};
	}

	[[nodiscard]] std::string address() const override { return listener_->address(); }

private:
	status check(const std::string &name, std::uint64_t bytes, std::size_t page_bytes) const
	{
		if (name.empty() || name.size() >= sizeof(request::name))
			return error{EINVAL, "far server: a region's name has 1 to 95 bytes"};
		if (!std::has_single_bit(page_bytes) || page_bytes < 4096 || page_bytes > 4 << 20)
			return error{EINVAL, "far server: page_bytes is a power of two from 4 KiB to 4 MiB"};
		if (!bytes || bytes > 1ULL << 46)
			return error{EINVAL, "far server: a region has 1 byte to 64 TiB"};
		if (regions_.contains(name))
			return error{EEXIST, "far server: there is a region \"" + name + "\""};
		return {};
	}

	status publish(const std::string &name, std::unique_ptr<lent> r)
	{
		result<std::unique_ptr<transport::region>> data =
		    context_.register_memory({r->memory, r->bytes});
		if (!data)
			return data.why();
		r->data = std::move(*data);
		r->verifier = some_id() | 1;
		if (r->made) {
			made_ += r->made;
			made_regions_++;
		}
		regions_.emplace(name, std::move(r));
		return {};
	}

	status add(const std::string &name, std::uint64_t bytes, std::size_t page_bytes,
		   const std::string &path, bool of_client)
	{
		if (status s = check(name, bytes, page_bytes); !s)
			return s;
		auto r = std::make_unique<lent>();
		const std::uint64_t pages = (bytes + page_bytes - 1) / page_bytes;

		r->page_bytes = page_bytes;
		r->table_bytes = (pages * sizeof(entry) + 4095) / 4096 * 4096;
		r->size = bytes;
		r->bytes = pages * page_bytes + r->table_bytes;
		if (of_client && (made_regions_ >= most_made || pages * page_bytes > how_.clients_may_make ||
				  made_ > how_.clients_may_make - pages * page_bytes))
			return error{EDQUOT, "far server: clients may not make a region of that size, or "
					     "not so many"};
		int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
		if (!path.empty()) {
			if (status s = open_file(*r, path); !s)
				return s;
			flags = MAP_SHARED;
		} else {
			r->id = some_id();
		}
		void *const p = ::mmap(nullptr, r->bytes, PROT_READ | PROT_WRITE, flags,
				       r->file ? r->file->fd.get() : -1, 0);
		if (p == MAP_FAILED)
			return transport::failure(errno, "far server: memory for region \"" + name + "\"");
		r->memory = static_cast<std::byte *>(p);
		if (of_client)
			r->made = pages * page_bytes;
		return publish(name, std::move(r));
	}

	std::uint64_t some_id() { return static_cast<std::uint64_t>(random_()) << 32 | random_(); }

	/*
	 * Entries are found by the page size, so a file that was made with another one would be read as
	 * something that was never written. Its mark says what it was made with.
	 */
	status open_file(lent &r, const std::string &path)
	{
		transport::descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
		const int fd = file.get();
		const auto end = static_cast<off_t>(r.bytes);
		file_mark mark{};
		struct stat st;

		if (!file)
			return transport::failure(errno, path);
		/* The lock is the file's, whatever name it was opened by, and ends with the process. */
		if (::flock(fd, LOCK_EX | LOCK_NB)) {
			if (errno == EWOULDBLOCK)
				return error{EBUSY,
					     path + ": is lent already, by this server or by another one"};
			return transport::failure(errno, path + ": to lock it");
		}
		if (::fstat(fd, &st))
			return transport::failure(errno, path);
		if (!S_ISREG(st.st_mode))
			return error{EINVAL, path + ": is no regular file"};
		if (st.st_size == 0) {
			std::copy(std::begin(file_magic), std::end(file_magic), mark.magic);
			mark.bytes = r.size;
			mark.page_bytes = r.page_bytes;
			mark.id = some_id();
			/* This also gives the file its size: there is no file of that size without a mark. */
			const ssize_t n = ::pwrite(fd, &mark, sizeof(mark), end);
			const int code = n < 0 ? errno : n < static_cast<ssize_t>(sizeof(mark)) ? ENOSPC : 0;
			if (code || ::fsync(fd)) {
				const error why = transport::failure(code ? code : errno, path);

				(void)!::ftruncate(fd, 0);
				return why;
			}
		} else {
			const off_t at = st.st_size - static_cast<off_t>(sizeof(mark));
			if (at < 0 || ::pread(fd, &mark, sizeof(mark), at) != sizeof(mark) ||
			    !std::equal(std::begin(file_magic), std::end(file_magic), mark.magic))
				return error{
				    EINVAL, path + ": is not empty, and was not made by a far server of this "
						   "version; it is left as it is"};
			if (mark.bytes != r.size || mark.page_bytes != r.page_bytes)
				return error{EINVAL, path + ": is a region of " +
							 size_of(mark.bytes, mark.page_bytes) +
							 ", and not of " + size_of(r.size, r.page_bytes) +
							 " as was asked for; it is left as it is"};
			if (at != end)
				return error{EINVAL,
					     path + ": has another size than its region needs, something was "
						    "cut out or put in; it is left as it is"};
		}
		/* A client that comes back after this server was started anew finds the same region. */
		r.id = mark.id;
		r.generation = mark.generation;
		r.tag = mark.tag;
		r.file = std::make_shared<lent_file>(std::move(file));
		return {};
	}

	static void block_signals() noexcept
	{
		sigset_t signals;

		::sigfillset(&signals);
		::pthread_sigmask(SIG_SETMASK, &signals, nullptr);
	}

	void serve() noexcept
	{
		std::vector<client> clients;
		std::vector<transport::connection *> all;
		std::uint64_t number = 0;
		bool told = false;

		block_signals();
		for (;;) {
			epoll_event e[3];

			all.clear();
			for (const client &c : clients)
				all.push_back(c.connection.get());
			(void)transport::wait(all, transport::clock::now() + std::chrono::hours(1),
					      events_.get());
			const int n = ::epoll_wait(events_.get(), e, 3, 0);
			for (int i = 0; i < n; i++) {
				if (e[i].data.fd == stop_.get()) {
					for (client &c : clients)
						end_one(std::move(c));
					return;
				}
				if (e[i].data.fd == flushed_.get()) {
					answer_flushes(clients);
					continue;
				}
				result<std::unique_ptr<transport::connection>> c =
				    listener_->accept(transport::clock::now());
				if (c) {
					client fresh = {std::move(*c), ++number};

					come();
					if (clients.size() + ending() < how_.max_connections)
						clients.push_back(std::move(fresh));
					else
						end_one(std::move(fresh));
				}
				/* Others concern one client, which hears of it. */
				if ((c.code() == EMFILE || c.code() == ENFILE) && !std::exchange(told, true))
					(void)std::fprintf(stderr, "nprdma-far: %s\n", c.why().text.c_str());
			}
			for (client &c : clients)
				if (!attend(c))
					end_one(std::move(c));
			std::erase_if(clients, [](const client &c) { return !c.connection; });
		}
	}

	void end_one(client &&c)
	{
		if (!c.connection->quiesce()) {
			{
				const std::lock_guard guard(ending_mutex_);
				to_end_.push_back(std::move(c));
				ending_++;
			}
			more_to_end_.notify_one();
			return;
		}
		/* At once: a client that comes back finds its region free. */
		std::exchange(c.connection, nullptr).reset();
		leave(c.number);
	}

	void come()
	{
		const std::lock_guard guard(mutex_);

		anybody_ = true;
		connected_++;
	}

	[[nodiscard]] std::size_t ending()
	{
		const std::lock_guard guard(ending_mutex_);

		return ending_;
	}

	void end() noexcept
	{
		std::unique_lock lock(ending_mutex_);

		block_signals();
		for (;;) {
			more_to_end_.wait(lock, [&] { return last_ || !to_end_.empty(); });
			if (to_end_.empty())
				return;
			client c = std::move(to_end_.front());
			to_end_.pop_front();
			lock.unlock();
			c.connection.reset();
			leave(c.number);
			lock.lock();
			ending_--;
		}
	}

	/*
	 * Makes files durable, which takes as long as the disk does, for whoever asked first. A client has
	 * one request in the queue at most.
	 */
	void flush() noexcept
	{
		std::unique_lock lock(flush_mutex_);

		block_signals();
		for (;;) {
			const std::uint64_t one = 1;

			more_to_flush_.wait(lock, [&] { return last_flush_ || !to_flush_.empty(); });
			/* Who waits for the others has lost his connection. */
			if (last_flush_)
				return;
			flush_request r = std::move(to_flush_.front());
			to_flush_.pop_front();
			lock.unlock();
			/* A shared mapping's pages are the file's. */
			const int code = r.sets ? mark(r) : ::fdatasync(r.file->fd.get()) ? errno : 0;
			/* relaxed: as it is said there */
			if (code)
				r.file->failures.fetch_add(1, std::memory_order_relaxed);
			const std::uint32_t failures = r.file->failures.load(std::memory_order_relaxed);
			r.file.reset();
			lock.lock();
			results_.push_back(
			    {r.number, r.verifier, failures, code, r.sets, r.generation, r.tag});
			(void)!::write(flushed_.get(), &one, sizeof(one));
		}
	}

	/* The generation in the file, durable, and no other page of it, which may take long. 0 or of errno.
	 */
	static int mark(const flush_request &r) noexcept
	{
		std::uint64_t words[] = {r.generation, r.tag};
		const iovec from = {words, sizeof(words)};
		const ssize_t n =
		    ::pwritev2(r.file->fd.get(), &from, 1,
			       r.mark_at + static_cast<off_t>(offsetof(file_mark, generation)), RWF_DSYNC);

		return n < 0 ? errno : n < static_cast<ssize_t>(sizeof(words)) ? EIO : 0;
	}

	void answer_flushes(std::vector<client> &clients)
	{
		std::vector<flush_result> results;
		std::uint64_t count;

		(void)!::read(flushed_.get(), &count, sizeof(count));
		{
			const std::lock_guard guard(flush_mutex_);
			results.swap(results_);
		}
		for (const flush_result &r : results) {
			if (r.sets && !r.code) {
				const std::lock_guard guard(mutex_);
				for (auto &[name, l] : regions_)
					if (l->verifier == r.verifier) {
						l->generation = r.generation;
						l->tag = r.tag;
					}
			}
			const auto c = std::find_if(clients.begin(), clients.end(),
						    [&](const client &x) { return x.number == r.number; });
			answer a{};

			if (c == clients.end())
				continue;
			a.magic = protocol_magic;
			a.verifier = r.verifier;
			a.failures = r.failures;
			if (r.code)
				refuse(a, transport::failure(r.code, "far server: fdatasync"));
			c->flushing = false;
			/* There is room, or the client does not play by the rules. */
			if (status s = c->connection->send(std::as_bytes(std::span(&a, 1))); !s)
				c->connection->shutdown();
		}
	}

	void leave(std::uint64_t number)
	{
		{
			const std::lock_guard guard(flush_mutex_);
			std::erase_if(to_flush_, [&](const auto &r) { return r.number == number; });
		}
		{
			const std::lock_guard guard(mutex_);

			for (auto &[name, r] : regions_)
				std::erase_if(r->users, [&](const auto &u) { return u.first == number; });
			owner_.erase(number);
			connected_--;
		}
		left_.notify_all();
	}

	/* False: it is gone, or talks nonsense. */
	bool attend(client &of) noexcept
	{
		transport::connection &c = *of.connection;
		transport::completion done[8];
		request r;

		(void)c.poll(done);
		for (int asked = 0; asked < most_at_once; asked++) {
			const result<std::size_t> n = c.receive(std::as_writable_bytes(std::span(&r, 1)));

			if (!n)
				return false;
			if (!*n)
				return c.alive();
			if (*n != sizeof(r) || r.magic != protocol_magic || r.name[sizeof(r.name) - 1] ||
			    of.flushing)
				return false;
			const std::optional<answer> a = handle(of.number, r);
			of.flushing = !a;
			/* One answer for each question: there is room, or the client does not play by the
			 * rules. */
			if (!a)
				continue;
			if (status s = c.send(std::as_bytes(std::span(&*a, 1))); !s)
				return false;
		}
		return c.alive();
	}

	static bool has_open(const lent &l, std::uint64_t number) noexcept
	{
		return std::any_of(l.users.begin(), l.users.end(),
				   [&](const auto &u) { return u.first == number; });
	}

	static void refuse(answer &a, const error &why) noexcept
	{
		a.code = why.code;
		why.text.copy(a.text, sizeof(a.text) - 1);
	}

	/* Nothing: the answer comes when the file is durable. */
	std::optional<answer> handle(std::uint64_t number, const request &r) noexcept
	{
		answer a{};
		const std::string name = r.name;

		a.magic = protocol_magic;
		if (r.what == op::flush || r.what == op::set_generation) {
			const bool sets = r.what == op::set_generation;
			const std::lock_guard guard(mutex_);
			const auto i = regions_.find(name);

			if (i == regions_.end() || !has_open(*i->second, number)) {
				refuse(a, {EINVAL, "far server: to flush what is not open"});
				return a;
			}
			lent &l = *i->second;
			/* Of a mirror, and so of one client. */
			if (sets && std::any_of(l.users.begin(), l.users.end(), [&](const auto &u) {
				    return u.first == number && (u.second & (open_read_only | open_shared));
			    })) {
				refuse(a, {EINVAL, "far server: who sets a generation has the region alone"});
				return a;
			}
			if (!l.file) {
				a.verifier = l.verifier;
				if (sets) {
					l.generation = r.generation;
					l.tag = r.tag;
				}
				return a;
			}
			{
				const std::lock_guard flush_guard(flush_mutex_);
				to_flush_.push_back({number, l.verifier, l.file, sets,
						     static_cast<off_t>(l.bytes), r.generation, r.tag});
			}
			more_to_flush_.notify_one();
			return std::nullopt;
		}
		if (r.what != op::open) {
			refuse(a, {EINVAL, "far server: an unknown request"});
			return a;
		}
		const std::lock_guard guard(mutex_);
		auto i = regions_.find(name);
		if (owner_.contains(number)) {
			refuse(a, {EALREADY, "far server: a connection opens one region, once"});
			return a;
		}
		if (i == regions_.end() && (r.flags & open_make)) {
			if (status s = add(name, r.bytes, r.page_bytes, {}, true); !s)
				refuse(a, s.why());
			else
				i = regions_.find(name);
			if (i == regions_.end())
				return a;
		}
		if (i == regions_.end()) {
			refuse(a, {ENOENT, "far server: no region \"" + name + "\""});
			return a;
		}
		lent &l = *i->second;
		const std::uint32_t how = r.flags & (open_read_only | open_shared);
		for (const auto &[who, was] : l.users)
			if (who != number && !((how & was) & (open_read_only | open_shared)) &&
			    owner_[who] != r.client) {
				refuse(a, {EBUSY,
					   "far server: region \"" + name +
					       "\" is open for another client; see network_options::shared"});
				return a;
			}
		owner_[number] = r.client;
		l.users.emplace_back(number, how);
		if (l.plain && l.had.size() < most_counted)
			l.had.insert(r.client);
		const transport::token t = l.data->remote();
		const std::uint64_t data_bytes = l.bytes - l.table_bytes;
		a.flags = l.plain ? region_plain : 0;
		a.id = l.id;
		a.generation = l.generation;
		a.tag = l.tag;
		a.owner = l.owner;
		if (!(r.flags & open_read_only))
			l.owner = r.client;
		a.verifier = l.verifier;
		a.failures = l.file ? l.file->failures.load(std::memory_order_relaxed) : 0;
		a.bytes = l.size;
		a.page_bytes = l.page_bytes;
		a.data = {t.addr, data_bytes, t.key};
		a.entries = {t.addr + data_bytes, l.table_bytes, t.key};
		return a;
	}

	transport::context &context_;
	const std::unique_ptr<transport::listener> listener_;
	const server_options how_;
	const transport::descriptor stop_, flushed_, events_;
	std::mutex mutex_; /* of what follows */
	std::map<std::string, std::unique_ptr<lent>> regions_;
	std::map<std::uint64_t, std::uint64_t> owner_; /* the client of each connection */
	std::uint64_t made_ = 0;                       /* bytes of clients' regions, without their entries */
	std::size_t made_regions_ = 0;
	std::size_t connected_ = 0; /* with those that are being ended */
	bool anybody_ = false;      /* was ever connected */
	std::condition_variable left_;
	std::random_device random_;

	std::mutex ending_mutex_; /* of what follows */
	std::condition_variable more_to_end_;
	std::deque<client> to_end_;
	std::size_t ending_ = 0; /* with the one that is being ended */
	bool last_ = false;

	std::mutex flush_mutex_; /* of what follows; taken after mutex_ if both are */
	std::condition_variable more_to_flush_;
	std::deque<flush_request> to_flush_;
	std::vector<flush_result> results_; /* flushed_ is readable for them */
	bool last_flush_ = false;
	std::thread ender_, flusher_, thread_;
};

} // namespace

result<std::unique_ptr<server>> server::make(transport::context &context, std::string_view address,
					     const server_options &how)
{
	result<std::unique_ptr<transport::listener>> listener = context.listen(address, protocol_room);

	if (!listener)
		return listener.why();
	transport::descriptor stop(::eventfd(0, EFD_CLOEXEC)),
	    flushed(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), events(::epoll_create1(EPOLL_CLOEXEC));
	const auto watch = [&](int fd) {
		epoll_event e{};

		e.events = EPOLLIN;
		e.data.fd = fd;
		return ::epoll_ctl(events.get(), EPOLL_CTL_ADD, fd, &e) == 0;
	};
	if (!stop || !flushed || !events || !watch(stop.get()) || !watch(flushed.get()) ||
	    !watch((*listener)->fd()))
		return transport::failure(errno, "far server");
	auto made = std::make_unique<serving>(context, std::move(*listener), how, std::move(stop),
					      std::move(flushed), std::move(events));
	if (status s = made->start(); !s)
		return s.why();
	return std::unique_ptr<server>(std::move(made));
}

} // namespace nprdma::far
