/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* UMap's interface: one pager for the process, made when something is mapped first. */
#include "umap_stores.hpp"

#include <umap/store/SparseStore.h>
#include <umap/umap.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sys/stat.h>
#include <system_error>

namespace far = nprdma::far;

namespace
{

std::uint64_t number(const char *name, std::uint64_t otherwise, std::uint64_t least, std::uint64_t most)
{
	const char *const text = std::getenv(name);
	char *end = nullptr;

	if (!text || !*text)
		return otherwise;
	errno = 0;
	const unsigned long long value = std::strtoull(text, &end, 0);
	if (*end || errno || *text == '-' || value < least || value > most) {
		std::fprintf(stderr, "umap: %s=%s: not a number from %llu to %llu; %llu is used\n", name,
			     text, static_cast<unsigned long long>(least),
			     static_cast<unsigned long long>(most),
			     static_cast<unsigned long long>(otherwise));
		return otherwise;
	}
	return value;
}

struct configuration {
	std::uint64_t system_page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
	std::uint64_t page = number("UMAP_PAGESIZE", system_page, system_page, 16 << 20);
	std::uint64_t buffer_pages = number("UMAP_BUFSIZE", free_pages(), 1, 1ULL << 40);
	std::uint64_t fillers = number("UMAP_PAGE_FILLERS", cpus(), 1, 256);
	std::uint64_t evictors = number("UMAP_PAGE_EVICTORS", std::min<std::uint64_t>(cpus(), 64), 1, 64);
	std::uint64_t high = number("UMAP_EVICT_HIGH_WATER_THRESHOLD", 90, 1, 100);
	std::uint64_t low = number("UMAP_EVICT_LOW_WATER_THRESHOLD", 70, 1, 100);
	std::uint64_t ahead = number("UMAP_READ_AHEAD", 0, 0, 4096);
	std::uint64_t events = number("UMAP_MAX_FAULT_EVENTS", 256, 1, 1 << 20);

	static std::uint64_t cpus()
	{
		return static_cast<std::uint64_t>(std::clamp(::sysconf(_SC_NPROCESSORS_ONLN), 1L, 256L));
	}
	std::uint64_t free_pages() const
	{
		return static_cast<std::uint64_t>(::sysconf(_SC_AVPHYS_PAGES)) * system_page / 10 * 8 / page;
	}
};

/* A user's store as the pager wants it. */
class adapted final : public far::store
{
public:
	adapted(Umap::Store *s, std::unique_ptr<Umap::Store> owned, std::uint64_t bytes)
	    : store_(s), owned_(std::move(owned)), bytes_(bytes)
	{
	}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }
	far::status read(const far::piece &p) noexcept override
	{
		const ssize_t n = store_->read_from_store(reinterpret_cast<char *>(p.memory.data()),
							  p.memory.size(), static_cast<off_t>(p.offset));
		if (n < 0 || static_cast<std::size_t>(n) > p.memory.size())
			return far::error{EIO, "umap: read_from_store() failed"};
		std::memset(p.memory.data() + n, 0, p.memory.size() - static_cast<std::size_t>(n));
		return {};
	}
	far::status write(const far::piece &p) noexcept override
	{
		if (store_->write_to_store(reinterpret_cast<char *>(p.memory.data()), p.memory.size(),
					   static_cast<off_t>(p.offset)) < 0)
			return far::error{EIO, "umap: write_to_store() failed"};
		return {};
	}

private:
	Umap::Store *const store_;
	const std::unique_ptr<Umap::Store> owned_;
	const std::uint64_t bytes_;
};

class file final : public Umap::Store
{
public:
	explicit file(int fd) : fd_(fd) {}

	ssize_t read_from_store(char *buf, std::size_t nb, off_t off) override
	{
		std::size_t done = 0;

		while (done < nb) {
			const ssize_t n = ::pread(fd_, buf + done, nb - done, off + static_cast<off_t>(done));
			if (n < 0 && errno == EINTR)
				continue;
			if (n < 0)
				return -1;
			if (n == 0)
				break;
			done += static_cast<std::size_t>(n);
		}
		return static_cast<ssize_t>(done);
	}

	ssize_t write_to_store(char *buf, std::size_t nb, off_t off) override
	{
		struct stat st;
		std::size_t done = 0;

		if (::fstat(fd_, &st))
			return -1;
		/* As with mmap(2): what is behind the end of the last page is not the file's. */
		if (S_ISREG(st.st_mode))
			nb = off < st.st_size
				 ? std::min<std::size_t>(nb, static_cast<std::size_t>(st.st_size - off))
				 : 0;
		while (done < nb) {
			const ssize_t n =
			    ::pwrite(fd_, buf + done, nb - done, off + static_cast<off_t>(done));
			if (n < 0 && errno == EINTR)
				continue;
			if (n <= 0)
				return -1;
			done += static_cast<std::size_t>(n);
		}
		return static_cast<ssize_t>(nb);
	}

private:
	const int fd_;
};

struct manager {
	std::mutex mutex;
	configuration how;
	std::unique_ptr<far::pager> pager;
	std::map<std::uintptr_t, std::unique_ptr<far::mapping>> mappings;

	/* The one that @addr is in; the end: none. */
	auto find(const void *addr)
	{
		const auto at = reinterpret_cast<std::uintptr_t>(addr);
		auto i = mappings.upper_bound(at);

		if (i == mappings.begin())
			return mappings.end();
		--i;
		return at - i->first < i->second->memory().size() ? i : mappings.end();
	}
};

manager &the()
{
	/* Never ended: other objects' destructors may touch what is mapped. */
	static manager *const m = new manager;

	return *m;
}

/* -1: it failed for one of them at least. */
template <class F> int for_all(F f)
{
	manager &m = the();
	const std::lock_guard guard(m.mutex);
	int result = 0;

	for (const auto &[at, one] : m.mappings)
		if (const far::status s = f(*one); !s) {
			errno = s.code();
			result = -1;
		}
	return result;
}

void *failed(int code)
{
	errno = code;
	return UMAP_FAILED;
}

} // namespace

namespace Umap
{

Store *Store::make_store(void *, std::size_t, std::size_t, int fd)
{
	return new file(fd);
}

void *umap_ex(void *addr, std::size_t length, int prot, int flags, int fd, off_t offset, Store *user)
{
	manager &m = the();
	const std::lock_guard guard(m.mutex);

	if (!length || offset < 0 || !(prot & PROT_READ) || (!user && fd < 0))
		return failed(EINVAL);
	if (!m.pager) {
		far::pager_options o;
		o.buffer_bytes = m.how.buffer_pages * m.how.page;
		o.high = static_cast<double>(m.how.high) / 100;
		o.low = static_cast<double>(std::min(m.how.low, m.how.high)) / 100;
		o.fillers = static_cast<unsigned>(m.how.fillers);
		o.evictors = static_cast<unsigned>(m.how.evictors);
		o.prefetch = static_cast<unsigned>(m.how.ahead);
		auto p = far::pager::make(o);
		if (!p) {
			std::fprintf(stderr, "umap: %s\n", p.why().text.c_str());
			return failed(p.code());
		}
		m.pager = std::move(*p);
	}
	std::shared_ptr<far::store> from = user ? user->native() : nullptr;
	if (!from) {
		std::unique_ptr<Store> owned(user ? nullptr
						  : Store::make_store(addr, length, m.how.page, fd));
		Store *const s = user ? user : owned.get();

		from = std::make_shared<adapted>(s, std::move(owned),
						 static_cast<std::uint64_t>(offset) + length);
	}
	far::map_options o;
	o.page_bytes = m.how.page;
	o.store_offset = static_cast<std::uint64_t>(offset);
	/* Programs round the length up to pages; a store of ours has its own end. */
	o.length = offset < static_cast<off_t>(from->bytes())
		       ? std::min<std::uint64_t>(length, from->bytes() - static_cast<std::uint64_t>(offset))
		       : 0;
	o.address = addr;
	o.fixed = flags & MAP_FIXED;
	o.read_only = !(prot & PROT_WRITE);
	auto mapped = m.pager->map(std::move(from), o);
	if (!mapped) {
		std::fprintf(stderr, "umap: %s\n", mapped.why().text.c_str());
		return failed(mapped.code());
	}
	void *const at = (*mapped)->memory().data();
	m.mappings[reinterpret_cast<std::uintptr_t>(at)] = std::move(*mapped);
	return at;
}

SparseStore::SparseStore(std::size_t bytes, std::size_t page_bytes, std::string directory,
			 std::size_t file_bytes)
{
	far::sparse_options how;
	const std::size_t unit = std::max<std::size_t>(page_bytes, 4096);

	how.file_bytes = (std::max<std::size_t>(file_bytes, 1) + unit - 1) / unit * unit;
	auto s = far::sparse_store(directory, bytes, how);
	if (s)
		store_ = std::move(*s);
	else
		status_ = s.code();
}

SparseStore::SparseStore(std::string directory, bool read_only)
{
	far::sparse_options how;

	how.read_only = read_only;
	auto s = far::sparse_store(directory, 0, how);
	if (s)
		store_ = std::move(*s);
	else
		status_ = s.code();
}

SparseStore::~SparseStore()
{
	(void)close_files();
}

ssize_t transfer(const std::shared_ptr<far::store> &s, char *buf, std::size_t nb, off_t off, bool write)
{
	if (!s || off < 0)
		return -1;
	const far::piece p = {static_cast<std::uint64_t>(off), {reinterpret_cast<std::byte *>(buf), nb}};
	const far::status done = write ? s->write(p) : s->read(p);

	return done ? static_cast<ssize_t>(nb) : -1;
}

ssize_t SparseStore::read_from_store(char *buf, std::size_t nb, off_t off)
{
	return transfer(store_, buf, nb, off, false);
}
ssize_t SparseStore::write_to_store(char *buf, std::size_t nb, off_t off)
{
	return transfer(store_, buf, nb, off, true);
}
std::size_t SparseStore::get_current_capacity()
{
	return store_ ? store_->bytes() : 0;
}

std::size_t SparseStore::get_capacity(std::string directory)
{
	SparseStore s(std::move(directory), true);

	return s.get_current_capacity();
}

int SparseStore::close_files()
{
	return store_ && store_->flush() ? 0 : -1;
}

} // namespace Umap

extern "C" {

void *umap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
	return Umap::umap_ex(addr, length, prot, flags, fd, offset, nullptr);
}

int uunmap(void *addr, size_t length)
{
	if (Umap::unlend(addr))
		return 0;
	manager &m = the();
	const std::lock_guard guard(m.mutex);
	const auto i = m.find(addr);

	if (i == m.mappings.end()) {
		errno = EINVAL;
		return -1;
	}
	far::mapping &one = *i->second;
	const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(addr) - i->first;
	const std::uint64_t rest = one.memory().size() - offset;
	const bool all = offset == 0 && (length == 0 || length >= rest);
	const far::status s =
	    all ? one.unmap() : one.unmap(offset, std::min<std::uint64_t>(length ? length : rest, rest));
	if (!s) {
		errno = s.code();
		return -1;
	}
	if (all)
		m.mappings.erase(i);
	return 0;
}

int umap_flush(void)
{
	return for_all([](far::mapping &one) { return one.flush(); });
}

int umap_evict(void)
{
	return for_all([](far::mapping &one) { return one.evict(); });
}

int umap_has_write_support(void)
{
	return 1;
}

void umap_prefetch(int npages, struct umap_prefetch_item *page_array)
{
	manager &m = the();
	const std::lock_guard guard(m.mutex);

	for (int n = 0; n < npages; n++) {
		const auto i = m.find(page_array[n].page_base_addr);

		if (i != m.mappings.end())
			(void)i->second->advise(
			    reinterpret_cast<std::uintptr_t>(page_array[n].page_base_addr) - i->first, 1,
			    far::hint::will_need);
	}
}

void umap_fetch_and_pin(char *paddr, uint64_t size)
{
	manager &m = the();
	const std::lock_guard guard(m.mutex);
	const auto i = m.find(paddr);

	if (i == m.mappings.end())
		return;
	const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(paddr) - i->first;
	if (const far::status s = i->second->advise(
		offset, std::min(size, i->second->memory().size() - offset), far::hint::pin);
	    !s)
		std::fprintf(stderr, "umap: %s\n", s.why().text.c_str());
}

long umapcfg_get_system_page_size(void)
{
	return ::sysconf(_SC_PAGESIZE);
}
uint64_t umapcfg_get_max_pages_in_buffer(void)
{
	return the().how.buffer_pages;
}
void umapcfg_set_max_pages_in_buffer(uint64_t max_pages)
{
	manager &m = the();
	const std::lock_guard guard(m.mutex);

	m.how.buffer_pages = std::max<std::uint64_t>(max_pages, 1);
	if (m.pager)
		m.pager->set_buffer_bytes(m.how.buffer_pages * m.how.page);
}
uint64_t umapcfg_get_umap_page_size(void)
{
	return the().how.page;
}
void umapcfg_set_umap_page_size(uint64_t page_size)
{
	manager &m = the();

	/* Others would make every umap() fail. */
	if (page_size >= m.how.system_page && page_size <= 16 << 20 && !(page_size & (page_size - 1)) &&
	    !m.pager)
		m.how.page = page_size;
}
uint64_t umapcfg_get_num_fillers(void)
{
	return the().how.fillers;
}
void umapcfg_set_num_fillers(uint64_t n)
{
	the().how.fillers = std::clamp<uint64_t>(n, 1, 256);
}
uint64_t umapcfg_get_num_evictors(void)
{
	return the().how.evictors;
}
void umapcfg_set_num_evictors(uint64_t n)
{
	the().how.evictors = std::clamp<uint64_t>(n, 1, 64);
}
uint64_t umapcfg_get_num_flushers(void)
{
	return umapcfg_get_num_evictors();
}
void umapcfg_set_num_flushers(uint64_t n)
{
	umapcfg_set_num_evictors(n);
}
uint64_t umapcfg_get_max_fault_events(void)
{
	return the().how.events;
}
void umapcfg_set_max_fault_events(uint64_t n)
{
	the().how.events = n;
}
uint64_t umapcfg_get_read_ahead(void)
{
	return the().how.ahead;
}
int umapcfg_get_evict_low_water_threshold(void)
{
	return static_cast<int>(the().how.low);
}
int umapcfg_get_evict_high_water_threshold(void)
{
	return static_cast<int>(the().how.high);
}

} // extern "C"
