/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Queue pairs: the context, the requester that turns send work requests into
 * packets, and the responder that executes those of the other side.
 */
#ifndef NPHCA_QP_H
#define NPHCA_QP_H

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "bits.h"
#include "fabric.h"
#include "mkey.h"
#include "queues.h"

namespace nphca {

class device;

inline constexpr size_t max_wqe = 1024;

struct segment {
	uint64_t va; /* inline: where in the request's data */
	uint32_t key, length;
	bool is_inline = false;
};

/* A send work request between its fetch and its completion. */
struct send_wqe {
	uint8_t opcode = 0;
	uint16_t counter = 0; /* index in the send queue, in 64-byte blocks */
	bool signaled = false, solicited = false, done = false, acked = false;
	wc_error error = wc_error::none;
	uint8_t vendor = 0;
	uint32_t imm = 0; /* or the key to invalidate */
	uint64_t va = 0, operand = 0, compare = 0;
	uint32_t rkey = 0, srqn = 0;
	uint32_t length = 0;
	uint32_t first_psn = 0, packets = 0;
	uint32_t next = 0;     /* packet to send next */
	uint32_t received = 0; /* packets of a READ's response that arrived */
	std::vector<segment> sgl;
	std::vector<uint8_t> data; /* of the segments that are inline */

	[[nodiscard]] bool wants_response() const noexcept
	{
		return opcode == WQE_READ || opcode == WQE_CAS || opcode == WQE_FAA;
	}
};

/* A receive work request while a message arrives in it. */
struct recv_wqe {
	bool valid = false;
	uint16_t counter = 0;
	uint32_t srqn = 0; /* whence it came, 0: the own queue */
	uint64_t capacity = 0;
	uint32_t filled = 0;
	std::vector<segment> sgl;
};

/* What the responder still has to send, in this order. */
struct response {
	enum kind : uint8_t { read, atomic, ack, nak } what = ack;
	uint32_t psn = 0;	/* first */
	uint32_t srqn = 0;
	uint32_t packets = 1, next = 0;
	uint64_t va = 0;
	uint32_t rkey = 0, length = 0;
	uint64_t original = 0;	/* atomic */
	uint8_t code = 0;	/* NAK */
	bool again = false;	/* asked for before */
	bool answered = false;	/* ... and answered to its end: this may be a late copy */
	uint64_t after = 0;	/* so many writes were posted before it: what an ACK waits for */
	std::vector<packet *> ahead; /* what was fetched before its turn, by packet; mostly empty */
};

/* A request that came before one that was sent before it, and what of it is done. */
struct early_request {
	packet *p = nullptr;
	bool placed = false;		 /* a WRITE's data is in memory */
	std::vector<packet *> fetched {}; /* a READ's is here */
};

struct qp {
	qp(device &owner) : dev(owner) {}
	~qp();
	qp(const qp &) = delete;
	qp &operator=(const qp &) = delete;

	/* Polling thread's entry points */
	void doorbell();		/* the send queue has grown */
	void turn();			/* from the scheduler */
	void timer();			/* the deadline has passed */
	void receive(packet &p);
	void modified();		/* context changed by a command */
	void to_error(uint8_t event);	/* event 0: none */
	void to_reset();
	/* A command is about to end it, or a key by its index (0: all of them): what is queued may happen before. */
	void trail_reads(uint32_t key);

	[[nodiscard]] bool is_connected() const noexcept { return st == ST_RC || st == ST_UC || st == ST_XRC; }
	[[nodiscard]] bool is_datagram() const noexcept { return st == ST_UD || st == ST_QP1 || st == ST_QP0; }
	[[nodiscard]] bool is_reliable() const noexcept { return st == ST_RC || st == ST_XRC; }
	/* ... over the link, and not just flushes. */
	[[nodiscard]] bool sends_to_others() const noexcept;
	/* From a connected QP to its peer. */
	void address(packet &p) const noexcept;
	[[nodiscard]] bool is_from_peer(const packet &p) const noexcept;

	device &dev;
	uint32_t qpn = 0;
	std::array<uint8_t, qpc_size> context{};

	/* Decoded context */
	uint8_t st = 0;
	qp_state state = qp_state::rst;
	uint8_t rq_type = RQ_NONE;
	uint32_t pd = 0, xrcd = 0, cqn_send = 0, cqn_recv = 0, srqn = 0, uidx = 0xffffff;
	uint32_t remote_qpn = 0, qkey = 0, mtu = 256;
	uint16_t dlid = 0;
	uint8_t sl = 0;
	roce_path to{}; /* Ethernet, from the address of this index */
	uint8_t address_index = 0;
	bool may_read = false, may_write = false, may_atomic = false;
	uint32_t max_requests = 1, max_responses = 1; /* READs and atomics under way */
	uint8_t retry_count = 0, rnr_retry = 0, rnr_code = 0, ack_timeout = 0;
	uint64_t dbr = 0;
	queue_buffer buffer;
	uint64_t sq_offset = 0;
	uint32_t log_rq = 0, log_rq_stride = 4, log_sq = 0;
	bool has_sq = false;

	/* Scheduler */
	bool queued = false;	   /* in the fabric's ready list */
	bool waiting = false;	   /* in the fabric's list of those who wait for the link */
	bool placing = false;	   /* ... and for writes that are posted */
	bool timer_queued = false; /* has an entry in the fabric's timers */
	uint64_t deadline = UINT64_MAX;

	void decode() noexcept;
	[[nodiscard]] bool waits_for_placement() const noexcept
	{
		return !responses_.empty() && is_posted_before(responses_.front());
	}
	[[nodiscard]] accessor self() const noexcept { return {pd, qpn, st == ST_REG_UMR}; }

private:
	/* requester.cpp */
	enum class step { done, blocked, no_packet };
	bool requester_turn();
	step fetch();
	wc_error parse(send_wqe &w, const_bytes raw);
	step send_packet(send_wqe &w);
	void send_datagram(send_wqe &w, const_bytes raw);
	void fail(send_wqe &w, wc_error error, uint8_t vendor) noexcept;
	void retire();
	void complete_send(const send_wqe &w);
	void flush_send();
	void rewind(uint32_t psn);
	void acknowledged(uint32_t psn);
	void handle_ack(packet &p);
	send_wqe *awaiting(const packet &p, uint32_t *into);
	void handle_read_response(packet &p);
	void handle_atomic_response(packet &p);
	void fail_at(uint32_t psn, wc_error error, uint8_t vendor);
	void retransmit(uint32_t psn);
	void ask_again(uint32_t psn);
	void progress() noexcept;
	void start_timer() noexcept;
	mem_result gather(const send_wqe &w, uint32_t offset, uint8_t *buf, uint32_t len);
	mem_result scatter(const std::vector<segment> &sgl, uint64_t offset, const uint8_t *buf, uint32_t len,
			   const accessor &who);
	void count_outstanding() noexcept;
	bool read_sq(uint16_t counter, uint8_t *buf, size_t len);
	[[nodiscard]] uint16_t sq_mask() const noexcept { return static_cast<uint16_t>((1u << log_sq) - 1); }

	/* responder.cpp */
	bool responder_turn();
	void receive_reliable(packet &p);
	void execute(packet &p);
	void trail(const packet &p);
	bool take_early(const packet &p);
	void run_early();
	void drop_early(early_request &e) noexcept;
	void receive_unreliable(packet &p);
	void receive_datagram(packet &p);
	void request_send(packet &p, uint8_t base);
	void request_write(packet &p, uint8_t base);
	void request_read(packet &p);
	void repeat_read(const packet &p);
	void repeat_atomic(const packet &p);
	void insert_response(const response &r);
	void request_atomic(packet &p);
	[[nodiscard]] bool message_fits(const packet &p, bool first, bool last);
	void respond(response r);
	[[nodiscard]] bool is_posted_before(const response &r) const noexcept;
	bool send_response(response &r);
	packet *fetch_read(const response &r, uint32_t index, size_t reserve, mem_result *result);
	bool send_ack(uint32_t psn, uint8_t syndrome);
	[[nodiscard]] bool fill_recv(const packet &p, mem_result *result);
	[[nodiscard]] srq *srq_of(uint32_t named) const noexcept;
	[[nodiscard]] accessor receiver() const noexcept;
	[[nodiscard]] accessor remote(uint32_t named) const noexcept;
	void acknowledge(const packet &p);
	void refuse(const packet &p, uint8_t nak, wc_error recv_error, uint8_t event);
	void refuse_memory(const packet &p, mem_result why);
	void refuse_recv(const packet &p, mem_result why);
	void not_ready(const packet &p);
	void finish_recv(const packet &p, uint8_t opcode, wc_error error);
	bool take_recv(const packet &p);
	void flush_recv();
	uint16_t posted_recvs();
	bool fetch_ahead(response &r, uint32_t index);
	bool overlap_reads();
	void fetch_at_random();
	void drop_responses();
	[[nodiscard]] bool listening() const noexcept
	{
		return state == qp_state::rtr || state == qp_state::rts || state == qp_state::sqd ||
		       (state == qp_state::sqer && !is_reliable());
	}

	/* Requester */
	std::deque<send_wqe> inflight_;
	size_t cursor_ = 0;	       /* of inflight_: what is being sent */
	uint16_t sq_head_ = 0, sq_pi_ = 0;
	uint32_t next_psn_ = 0, acked_psn_ = 0; /* acked: all before it */
	uint32_t outstanding_ = 0;     /* READs and atomics sent and not answered */
	bool stalled_ = false;	       /* nothing more until the head has failed */
	bool waiting_rnr_ = false;
	bool asked_again_ = false;     /* for the oldest answer that is missing */
	uint8_t retries_ = 0, rnr_retries_ = 0;
	uint8_t patience_ = 0;	       /* time-outs that were let pass */

	/* Responder */
	uint32_t expected_psn_ = 0, msn_ = 0;
	bool nak_sent_ = false;	       /* one NAK per gap */
	bool refused_ = false;	       /* a fatal NAK is queued: listen no more */
	bool ended_ = false;	       /* in error, and a command said so */
	uint8_t refuse_event_ = 0;
	enum : uint8_t { idle, in_send, in_write } message_ = idle;
	bool skip_message_ = false;    /* UC: the rest of a broken message */
	recv_wqe recv_;
	uint64_t write_va_ = 0;
	uint32_t write_key_ = 0, write_left_ = 0, message_length_ = 0;
	std::deque<response> responses_;
	std::vector<early_request> early_;
	early_request *turn_ = nullptr; /* whose turn it is */
	struct done_atomic {
		uint32_t psn;
		uint64_t original;
	};
	std::deque<done_atomic> atomics_; /* answers to duplicates */
	uint16_t rq_head_ = 0, rq_pi_ = 0;
	uint64_t flush_poll_ = 0;      /* interval at which a failed QP looks for new receives */

	friend class device;
};

} // namespace nphca

#endif
