/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One side that posts READs and WRITEs, by plain verbs with a pinned buffer, or through
 * libnprdma with one that is not pinned, connected to a responder in the same process.
 */
#ifndef NPRDMA_BENCH_INITIATOR_HPP
#define NPRDMA_BENCH_INITIATOR_HPP

#include "bench.hpp"

#include <nprdma/nprdma.hpp>

#include <stdexcept>

namespace bench
{

enum class through {
	verbs,
	library,
	library_relaxed,
	library_scanning, /* without leases; READs, whatever their size */
	library_by_words  /* the same; READs of any size are proven by residency words */
};

class initiator
{
public:
	initiator(const std::string &device, const rc::endpoint &responder, through how,
		  std::size_t buffer_bytes)
	    : end_(device, cq_entries),
	      buffer_(buffer_bytes, mapping::pages::small),
	      qp_(end_.create_qp(sq_entries)),
	      other_(responder.create_qp(1))
	{
		rc::connect_pair(*qp_, *other_);
		if (how == through::verbs) {
			pinned_ =
			    end_.register_memory(buffer_.addr(), buffer_.bytes(), IBV_ACCESS_LOCAL_WRITE);
			return;
		}
		unpinned_.emplace(*end_.pd,
				  std::span(static_cast<std::byte *>(buffer_.addr()), buffer_.bytes()),
				  IBV_ACCESS_LOCAL_WRITE);
		npr_qp_attr attr{};

		if (how == through::library_relaxed)
			attr.flags = NPR_QP_RELAXED_ORDER;
		if (how == through::library_scanning)
			attr.read_words_min = std::numeric_limits<std::uint32_t>::max();
		if (how == through::library_by_words)
			attr.read_words_min = 1;
		const bool proves = how == through::library_scanning || how == through::library_by_words;
		context_.emplace(*end_.context, proves ? NPR_OPEN_NO_LEASES : 0);
		cq_.emplace(context_->attach(*end_.cq));
		library_.emplace(cq_->attach(*qp_, attr));
	}

	void post(ibv_wr_opcode opcode, std::uint64_t remote, std::uint32_t rkey, std::size_t local,
		  std::uint32_t length)
	{
		ibv_sge sge = {.addr = buffer_.address() + local,
			       .length = length,
			       .lkey = unpinned_ ? unpinned_->get()->lkey : pinned_->lkey};
		ibv_send_wr wr{}, *bad = nullptr;

		wr.sg_list = &sge;
		wr.num_sge = 1;
		wr.opcode = opcode;
		wr.send_flags = IBV_SEND_SIGNALED;
		wr.wr.rdma.remote_addr = remote;
		wr.wr.rdma.rkey = rkey;
		if (const int error =
			library_ ? -library_->post_send(wr, bad) : ibv_post_send(qp_.get(), &wr, &bad))
			rc::fail(error, "post");
	}

	/* Completions so far unseen: at least one if @block says how to wait for it. */
	int poll()
	{
		ibv_wc wc[16];
		const int n = cq_ ? cq_->poll(wc) : ibv_poll_cq(end_.cq.get(), 16, wc);

		if (n < 0)
			rc::fail(cq_ ? -n : EIO, "poll");
		for (int i = 0; i < n; i++)
			if (wc[i].status != IBV_WC_SUCCESS)
				throw std::runtime_error(std::string("operation failed: ") +
							 ibv_wc_status_str(wc[i].status));
		return n;
	}

	/* One operation, polled for. */
	void transfer(ibv_wr_opcode opcode, std::uint64_t remote, std::uint32_t rkey, std::uint32_t length)
	{
		post(opcode, remote, rkey, 0, length);
		while (!poll())
			;
	}

	/* Look at what came, as an application would: at one word of each cache line. */
	void use(std::uint32_t length) const noexcept
	{
		for (std::uint32_t at = 0; at < length; at += 64) {
			[[maybe_unused]] const char byte = buffer_.at_byte(at);
		}
	}

	/* One operation, slept for; libnprdma only. */
	void transfer_sleeping(ibv_wr_opcode opcode, std::uint64_t remote, std::uint32_t rkey,
			       std::uint32_t length)
	{
		post(opcode, remote, rkey, 0, length);
		for (;;) {
			if (const int error = cq_->req_notify())
				rc::fail(-error, "npr_req_notify_cq");
			if (poll())
				return;
			if (const int n = cq_->wait(); n < 0)
				rc::fail(-n, "npr_wait_cq");
			if (poll())
				return;
		}
	}

	[[nodiscard]] const mapping &buffer() const noexcept { return buffer_; }
	[[nodiscard]] nprdma::qp &library() { return library_.value(); }

private:
	static constexpr int cq_entries = 1024;
	static constexpr std::uint32_t sq_entries = 256;

	rc::endpoint end_;
	mapping buffer_;
	rc::handle<ibv_mr> pinned_;
	std::optional<nprdma::region> unpinned_;
	rc::handle<ibv_qp> qp_, other_;
	std::optional<nprdma::context> context_;
	std::optional<nprdma::cq> cq_;
	std::optional<nprdma::qp> library_;
};

} // namespace bench

#endif // NPRDMA_BENCH_INITIATOR_HPP
