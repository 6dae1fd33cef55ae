/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "builders.hpp"

#include "registry.hpp"

#include <cerrno>
#include <new>

namespace npr::preload {

namespace {

builder &of(const ibv_qp_ex *ex) noexcept
{
	return *find(ex->qp_base.context)->builders.find(ex->qp_base.handle, &ex->qp_base);
}

} // namespace

void builder::put_into(ibv_qp_ex &ex) noexcept
{
	ex.wr_start = [](ibv_qp_ex *q) { of(q).begin(q); };
	ex.wr_set_sge = [](ibv_qp_ex *q, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) {
		of(q).set_sge(q, lkey, addr, length);
	};
	ex.wr_set_sge_list = [](ibv_qp_ex *q, std::size_t n, const ibv_sge *list) { of(q).set_sge_list(q, n, list); };
	ex.wr_complete = [](ibv_qp_ex *q) { return of(q).complete(q); };
}

void builder::begin(ibv_qp_ex *ex) noexcept
{
	theirs_.wr_start(ex);
	error_ = 0;
}

void builder::set_sge(ibv_qp_ex *ex, std::uint32_t lkey, std::uint64_t addr, std::uint32_t length) noexcept
{
	ibv_sge s{addr, length, lkey};

	if (!error_ && regions_.any())
		error_ = regions_.translate(s);
	if (!error_)
		theirs_.wr_set_sge(ex, s.lkey, addr, length);
}

void builder::set_sge_list(ibv_qp_ex *ex, std::size_t n, const ibv_sge *list) noexcept
{
	if (!regions_.any())
		return theirs_.wr_set_sge_list(ex, n, list);
	try {
		sges_.assign(list, list + n);
	} catch (const std::bad_alloc &) {
		error_ = error_ ? error_ : ENOMEM;
	}
	for (auto s = sges_.begin(); !error_ && s != sges_.end(); ++s)
		error_ = regions_.translate(*s);
	if (!error_)
		theirs_.wr_set_sge_list(ex, n, sges_.data());
}

int builder::complete(ibv_qp_ex *ex) noexcept
{
	/* Another thread may begin as soon as the lock is given back. */
	const int error = error_;

	if (!error)
		return theirs_.wr_complete(ex);
	theirs_.wr_abort(ex);
	return error;
}

} // namespace npr::preload
