/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The public face of pagers and mappings. */
#include "pager_state.hpp"

#include <bit>
#include <sys/epoll.h>
#include <sys/eventfd.h>

namespace nprdma::far
{

mapping::mapping(std::shared_ptr<pager_state> p, std::shared_ptr<area> a) noexcept
    : pager_(std::move(p)), area_(std::move(a))
{
}

mapping::~mapping()
{
	if (area_)
		(void)pager_->unmap_all(area_, true);
}

namespace
{

error unmapped()
{
	return error{EINVAL, "the mapping was unmapped"};
}

} // namespace

std::span<std::byte> mapping::memory() const noexcept
{
	return area_ ? std::span(area_->base, area_->bytes) : std::span<std::byte>();
}

std::size_t mapping::page_bytes() const noexcept
{
	return area_ ? area_->page_bytes : 0;
}
status mapping::flush()
{
	return area_ ? pager_->flush(*area_) : unmapped();
}
status mapping::evict()
{
	return area_ ? pager_->evict(*area_) : unmapped();
}

status mapping::accept_loss()
{
	if (!area_)
		return unmapped();
	if (area_->source->intact())
		return {};
	if (status s = pager_->evict(*area_); !s)
		return s;
	return area_->source->accept_loss();
}

status mapping::discard(std::uint64_t offset, std::uint64_t bytes)
{
	return area_ ? pager_->discard(*area_, offset, bytes) : unmapped();
}

status mapping::advise(std::uint64_t offset, std::uint64_t bytes, hint what)
{
	return area_ ? pager_->advise(*area_, offset, bytes, what) : unmapped();
}

void mapping::retry()
{
	if (area_)
		pager_->retry(*area_);
}

status mapping::unmap(std::uint64_t offset, std::uint64_t bytes)
{
	if (!area_)
		return unmapped();
	const bool all = offset == 0 && bytes == area_->bytes;
	status s = pager_->unmap(area_, offset, bytes);

	if (s && all)
		area_.reset();
	return s;
}

status mapping::unmap()
{
	return area_ ? unmap(0, area_->bytes) : unmapped();
}

error mapping::last_error() const
{
	if (!area_)
		return unmapped();
	const std::lock_guard guard(area_->error_mutex);
	return area_->last;
}

statistics mapping::stats() const noexcept
{
	return area_ ? pager_->stats(*area_) : statistics{};
}

pager::pager(std::shared_ptr<pager_state> state) noexcept : state_(std::move(state)) {}
pager::~pager() = default;

result<std::unique_ptr<pager>> pager::make(const pager_options &how)
{
	if (!(how.high > 0 && how.high <= 1 && how.low > 0 && how.low <= how.high))
		return error{EINVAL, "pager: of the marks it is 0 < low <= high <= 1"};
	if (how.fillers < 1 || how.fillers > 256 || how.evictors < 1 || how.evictors > 64 ||
	    how.prefetch > 4096)
		return error{EINVAL,
			     "pager: 1 to 256 fillers, 1 to 64 evictors, 0 to 4096 pages of prefetch"};
	result<uffd> u = uffd::open(how.user_faults_only, how.write_protection);
	if (!u)
		return u.why();
	transport::descriptor events(::epoll_create1(EPOLL_CLOEXEC)),
	    work(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
	epoll_event fault{}, call{};

	fault.events = call.events = EPOLLIN;
	fault.data.fd = u->fd();
	call.data.fd = work.get();
	if (!events || !work || ::epoll_ctl(events.get(), EPOLL_CTL_ADD, u->fd(), &fault) ||
	    ::epoll_ctl(events.get(), EPOLL_CTL_ADD, work.get(), &call))
		return transport::failure(errno, "pager");
	auto state = std::make_shared<pager_state>(how, std::move(*u), std::move(events), std::move(work));
	if (status s = state->start(); !s)
		return s.why();
	return std::unique_ptr<pager>(new pager(std::move(state)));
}

result<std::unique_ptr<mapping>> pager::map(std::shared_ptr<store> from, const map_options &how)
{
	const std::size_t system = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
	map_options o = how;

	if (!from)
		return error{EINVAL, "map: no store"};
	if (!o.page_bytes)
		o.page_bytes = system;
	if (!std::has_single_bit(o.page_bytes) || o.page_bytes < system || o.page_bytes > 16 << 20)
		return error{EINVAL, "map: page_bytes is a power of two from the system's page to 16 MiB"};
	if (o.store_offset % o.page_bytes || o.store_offset >= from->bytes())
		return error{EINVAL, "map: the offset is a multiple of page_bytes and inside of the store"};
	const std::uint64_t rest = from->bytes() - o.store_offset;
	const std::uint64_t length = o.length ? o.length : rest;
	if (length > rest || length > 1ULL << 46)
		return error{EINVAL, "map: the range is not inside of the store"};
	if (o.fixed && reinterpret_cast<std::uintptr_t>(o.address) % o.page_bytes)
		return error{EINVAL, "map: a fixed address is a multiple of page_bytes"};
	auto a = std::make_shared<area>(std::move(from), o, state_->faults().can_protect(), length, system);
	if (status s = a->prepare(); !s)
		return s.why();
	if (status s = state_->add(a); !s)
		return s.why();
	return std::unique_ptr<mapping>(new mapping(state_, std::move(a)));
}

statistics pager::stats() const noexcept
{
	return state_->stats();
}
bool pager::user_faults_only() const noexcept
{
	return state_->faults().user_only();
}
bool pager::write_protection() const noexcept
{
	return state_->faults().can_protect();
}
void pager::set_buffer_bytes(std::uint64_t bytes) noexcept
{
	state_->set_buffer_bytes(bytes);
}

} // namespace nprdma::far
