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
class poller {
public:
	poller(npr_cq &cq, bool threads) noexcept : cq_(cq), mutex_(threads) {}

	/* To the members of @q. 0; an errno, and then nobody calls end(). */
	[[nodiscard]] int start(ibv_cq_ex &q, const ibv_poll_cq_attr &attr) noexcept;
	/* 0 or an errno. */
	[[nodiscard]] int next(ibv_cq_ex &q) noexcept;
	void end() noexcept { mutex_.unlock(); }
	[[nodiscard]] const ibv_wc &wc() const noexcept { return wc_; }

private:
	npr_cq &cq_;
	optional_mutex mutex_;
	ibv_wc wc_{};
};

/* The functions of @q are those of the poller that @of(q) finds, but for those that @wc_flags do not ask for. */
template <poller &of(ibv_cq_ex *) noexcept>
void set_polling(ibv_cq_ex &q, std::uint64_t wc_flags) noexcept
{
	const auto asked = [&](std::uint64_t flag, auto f) { return wc_flags & flag ? +f : nullptr; };

	q.start_poll = [](ibv_cq_ex *p, ibv_poll_cq_attr *attr) { return of(p).start(*p, *attr); };
	q.next_poll = [](ibv_cq_ex *p) { return of(p).next(*p); };
	q.end_poll = [](ibv_cq_ex *p) { of(p).end(); };
	q.read_opcode = [](ibv_cq_ex *p) { return of(p).wc().opcode; };
	q.read_vendor_err = [](ibv_cq_ex *p) { return of(p).wc().vendor_err; };
	q.read_wc_flags = [](ibv_cq_ex *p) { return of(p).wc().wc_flags; };
	q.read_byte_len = asked(IBV_WC_EX_WITH_BYTE_LEN, [](ibv_cq_ex *p) { return of(p).wc().byte_len; });
	q.read_imm_data = asked(IBV_WC_EX_WITH_IMM, [](ibv_cq_ex *p) { return of(p).wc().imm_data; });
	q.read_qp_num = asked(IBV_WC_EX_WITH_QP_NUM, [](ibv_cq_ex *p) { return of(p).wc().qp_num; });
	q.read_src_qp = asked(IBV_WC_EX_WITH_SRC_QP, [](ibv_cq_ex *p) { return of(p).wc().src_qp; });
	q.read_slid = asked(IBV_WC_EX_WITH_SLID, [](ibv_cq_ex *p) { return std::uint32_t{of(p).wc().slid}; });
	q.read_sl = asked(IBV_WC_EX_WITH_SL, [](ibv_cq_ex *p) { return of(p).wc().sl; });
	q.read_dlid_path_bits =
		asked(IBV_WC_EX_WITH_DLID_PATH_BITS, [](ibv_cq_ex *p) { return of(p).wc().dlid_path_bits; });
}

/* What set_polling() changes is as in @from again. */
inline void copy_polling(ibv_cq_ex &to, const ibv_cq_ex &from) noexcept
{
	to.start_poll = from.start_poll;
	to.next_poll = from.next_poll;
	to.end_poll = from.end_poll;
	to.read_opcode = from.read_opcode;
	to.read_vendor_err = from.read_vendor_err;
	to.read_wc_flags = from.read_wc_flags;
	to.read_byte_len = from.read_byte_len;
	to.read_imm_data = from.read_imm_data;
	to.read_qp_num = from.read_qp_num;
	to.read_src_qp = from.read_src_qp;
	to.read_slid = from.read_slid;
	to.read_sl = from.read_sl;
	to.read_dlid_path_bits = from.read_dlid_path_bits;
}

/* One of the library's own. */
struct cq_ex : ibv_cq_ex {
	cq_ex(npr_cq &cq, const ibv_cq &verbs, bool threads) noexcept;

	poller polling;
};

} // namespace npr

#endif
