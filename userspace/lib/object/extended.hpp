/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The extended interfaces of verbs, ibv_wr_*() and ibv_start_poll() with what
 * follows, which are calls through pointers in the object: these objects are the
 * library's, and their pointers lead into it.
 */
#ifndef NPR_EXTENDED_HPP
#define NPR_EXTENDED_HPP

#include "optional_mutex.hpp"

#include <atomic>
#include <cstddef>
#include <infiniband/verbs.h>
#include <vector>

struct npr_cq;
struct npr_qp;

namespace npr {

/*
 * Work requests between ibv_wr_start() and ibv_wr_complete(), which belong to one
 * thread: it has the lock until then. What an application passes is copied at once.
 */
class qp_ex : public ibv_qp_ex {
public:
	/* Throws std::bad_alloc. */
	qp_ex(npr_qp &qp, const ibv_qp &verbs, std::uint32_t depth, std::uint32_t max_sge,
	      std::uint32_t max_inline, bool threads);
	/* What is posted is another's from now on, of the same queue pair; null: nobody's. */
	void move_to(npr_qp *qp) noexcept;

private:
	static qp_ex &self(ibv_qp_ex *q) noexcept { return *static_cast<qp_ex *>(q); }
	/* The next work request; null after an error. */
	[[nodiscard]] ibv_send_wr *add(ibv_wr_opcode opcode) noexcept;
	void add_rdma(ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr) noexcept;
	void add_atomic(ibv_wr_opcode opcode, std::uint32_t rkey, std::uint64_t addr,
			std::uint64_t compare_add, std::uint64_t swap) noexcept;
	/* The one whose data comes now; null after an error, or if it has some. */
	[[nodiscard]] ibv_send_wr *data() noexcept;
	void set_sges(std::size_t n, const ibv_sge *list) noexcept;
	void set_inline(std::size_t n, const ibv_data_buf *list) noexcept;
	[[nodiscard]] int complete() noexcept;

	std::atomic<npr_qp *> qp_;
	optional_mutex mutex_;
	std::size_t depth_, max_sge_, max_inline_;
	std::vector<ibv_send_wr> wrs_;
	std::vector<ibv_sge> sges_;
	std::vector<std::byte> inline_;
	std::size_t count_ = 0;
	bool has_data_ = false;
	int error_ = 0;
};

/* One completion at a time, which is one thread's from ibv_start_poll() to ibv_end_poll(). */
class cq_ex : public ibv_cq_ex {
public:
	cq_ex(npr_cq &cq, const ibv_cq &verbs, bool threads);

private:
	static cq_ex &self(ibv_cq_ex *q) noexcept { return *static_cast<cq_ex *>(q); }
	[[nodiscard]] int next() noexcept;

	npr_cq &cq_;
	optional_mutex mutex_;
	ibv_wc wc_{};
};

} // namespace npr

#endif
