/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include <nprdma/alloc/arena.hpp>

#include "arena_state.hpp"

#include <algorithm>
#include <array>
#include <iterator>

namespace nprdma::alloc {
namespace {

void check_registrar(const arena_state &of, std::size_t registrar)
{
	if (registrar >= of.registrars())
		throw std::out_of_range(of.name() + ": it has " + std::to_string(of.registrars()) +
					" registrars, and number " + std::to_string(registrar) + " is asked for");
}

} // namespace

arena::arena(std::span<registrar *const> registrars, const options &how)
    : state_(std::make_unique<arena_state>(registrars, npra::backing(how), how, nullptr))
{
}

arena::arena(registrar &one, const options &how) : arena(std::array{&one}, how) {}

arena::arena(std::span<registrar *const> registrars, std::span<std::byte> given, std::function<void()> cleanup,
	     const options &how)
    : state_(std::make_unique<arena_state>(registrars, npra::backing(given), how, std::move(cleanup)))
{
}

arena::~arena() = default;

void *arena::allocate(std::size_t bytes, std::size_t alignment)
{
	return state_->allocate(bytes, alignment);
}

void arena::deallocate(void *block)
{
	state_->deallocate(block);
}

void arena::deallocate(void *block, std::size_t bytes, std::size_t alignment)
{
	state_->deallocate(block, bytes, alignment);
}

buffer arena::acquire(std::size_t bytes, std::size_t alignment)
{
	buffer b;

	b.bytes_ = {static_cast<std::byte *>(allocate(bytes, alignment)), bytes};
	b.home_ = this;
	return b;
}

buffer arena::adopt(std::span<std::byte> given, std::function<void()> cleanup)
{
	buffer b;

	if (given.empty())
		throw bad_size(state_->name() + ": no memory was given to be adopted");
	b.adopted_ = std::make_unique<buffer::adopted>();
	b.adopted_->registrations = state_->add(given);
	/* Until here the memory is the caller's, who is told by an exception. */
	b.adopted_->cleanup = std::move(cleanup);
	b.bytes_ = given;
	b.home_ = this;
	return b;
}

std::size_t arena::size_of(const void *block) const
{
	return state_->size_of(block);
}

bool arena::owns(const void *p) const noexcept
{
	location where;
	const auto r = range();
	return state_->registrars() ? state_->find(p, 0, where) != nullptr
				    : static_cast<const std::byte *>(p) - r.data() < std::ssize(r) && p >= r.data();
}

std::optional<location> arena::find(const void *p, std::size_t registrar) const noexcept
{
	location where;
	return state_->find(p, registrar, where) ? std::optional(where) : std::nullopt;
}

location arena::locate(const void *p, std::size_t registrar) const
{
	location where;

	if (state_->find(p, registrar, where)) [[likely]]
		return where;
	check_registrar(*state_, registrar);
	throw foreign_pointer(state_->name() + ": an address that is not of this arena, or not registered");
}

std::size_t arena::discard(void *p, std::size_t bytes)
{
	return state_->discard(p, bytes);
}

std::size_t arena::trim()
{
	return state_->trim();
}

statistics arena::stats() const
{
	return state_->stats();
}

std::size_t arena::resident() const
{
	return state_->backing().resident();
}

std::vector<leak> arena::leaks(std::size_t limit) const
{
	return state_->leaks(limit);
}

std::span<std::byte> arena::range() const noexcept
{
	return state_->backing().bytes();
}

buffer::~buffer()
{
	if (!home_)
		return;
	if (!adopted_) {
		home_->deallocate(bytes_.data());
		return;
	}
	home_->state_->ended(adopted_->registrations);
	try {
		if (adopted_->cleanup && !home_->state_->inherited())
			adopted_->cleanup();
	} catch (...) {
		/* A destructor cannot tell. */
	}
}

location buffer::where(std::size_t registrar) const
{
	if (!home_)
		throw foreign_pointer("an empty buffer is nowhere");
	if (!adopted_)
		return home_->locate(bytes_.data(), registrar);
	check_registrar(*home_->state_, registrar);
	const keys k = adopted_->registrations[registrar]->keys();
	return {k.lkey, k.rkey, reinterpret_cast<std::uintptr_t>(bytes_.data()), 0};
}

} // namespace nprdma::alloc
