/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A small driver for the emulated HCA: memory that is an array with a page
 * table of rights, a clock that only moves when nothing is left to do, and the
 * verbs that the tests need, made of real commands and queue entries.
 */
#ifndef NPHCA_TESTS_DRIVER_H
#define NPHCA_TESTS_DRIVER_H

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bits.h"
#include "nphca.h"

namespace nphca::test {

enum : uint8_t { page_read = 1, page_write = 2 };

class machine {
public:
	static constexpr uint64_t ram_base = 0x10000000, ram_size = 48u << 20, page = 4096;

	machine();
	~machine();
	machine(const machine &) = delete;
	machine &operator=(const machine &) = delete;

	uint64_t alloc(uint64_t size, uint64_t align = page);
	uint8_t *at(uint64_t iova) { return ram_ + (iova - ram_base); }
	/* The page at @iova is that at @to from now on; what was translated before is not. */
	void move(uint64_t iova, uint64_t to) { moved_[(iova - ram_base) / page] = to & ~(page - 1); }
	void protect(uint64_t iova, uint8_t rights) { rights_[(iova - ram_base) / page] = rights; }
	void fill(uint64_t iova, size_t len, uint8_t seed);
	bool filled(uint64_t iova, size_t len, uint8_t seed);

	/* Until nothing is left to do now. */
	void run();
	/* ... letting time pass up to the timers within @ns, and those they lead to. */
	void run_for(uint64_t ns);

	/* A link to another machine, which then runs when this one does, on the same clock. */
	void join(machine &other);
	void leave();
	std::deque<std::vector<uint8_t>> arriving; /* over the link */
	size_t room = 64;			   /* for so many */
	bool stopped = false;			   /* does not run, as under a debugger */
	bool dead = false;			   /* takes nothing, either */

	struct nphca_fabric *fabric;
	uint64_t now = 1000000;
	/* Another clock, which moves when it is looked at, while the polling thread waits. */
	std::atomic<bool> ticking{false};
	std::atomic<uint64_t> ticks{0};
	struct request {
		uint64_t iova;
		size_t len;
		bool write;
	};
	std::vector<request> requests; /* recorded while record is set */
	bool record = false;
	uint64_t requests_done = 0;
	bool dma(uint64_t iova, void *buf, size_t len, bool write);
	void *target(uint64_t iova, size_t len);
	bool unpostable = false; /* no write can be posted */
	std::function<void(uint64_t iova, size_t len, bool write)> on_dma; /* before the translation */

private:
	uint64_t poll(bool *more);
	uint8_t *translate(uint64_t iova, size_t len, bool write);

	machine *other_ = nullptr;
	uint8_t *ram_; /* mapped, so that only what a test uses is touched */
	std::vector<uint8_t> rights_;
	uint64_t next_ = ram_base;
	std::map<uint64_t, uint64_t> moved_;
};

struct completion {
	uint8_t opcode, syndrome, vendor, wqe_opcode;
	uint32_t qpn, byte_count, imm, remote_qpn, uidx;
	uint16_t counter, slid;
	bool grh;
	uint8_t sl;  /* on Ethernet the kind of the network header */
	bool tagged; /* ... and a VLAN tag */
	uint16_t tag;
};

class port;

struct eq_t {
	uint32_t eqn = 0, log = 0, ci = 0;
	uint64_t buffer = 0;
};

struct cq_t {
	uint32_t cqn = 0, log = 0, ci = 0, arm_sn = 0;
	uint64_t buffer = 0, dbr = 0;
};

struct srq_t {
	uint32_t srqn = 0, log = 0;
	uint64_t buffer = 0, dbr = 0;
	uint16_t posted = 0;
};

struct qp_t {
	uint32_t qpn = 0, pd = 0;
	uint8_t st = ST_RC;
	cq_t *send = nullptr, *recv = nullptr;
	srq_t *srq = nullptr;
	uint64_t buffer = 0, dbr = 0;
	uint32_t log_sq = 6, log_rq = 6;
	uint16_t sq_pi = 0, rq_pi = 0;
};

struct qp_options {
	uint8_t st = ST_RC;
	bool read = true, write = true, atomic = true;
	uint32_t mtu = 3; /* 1024 */
	uint8_t retry = 2, rnr_retry = 2, timeout = 8, rnr_timer = 1;
	uint32_t log_max_rd = 4;
	uint32_t psn = 0xfffff0; /* close to the wrap */
	uint32_t qkey = 0x1234;
	uint8_t address = 0; /* Ethernet: own, by its index in the table, and the peer's */
	uint64_t mac = 0;
	std::array<uint8_t, 16> gid{};
	uint16_t sport = 0;
};

/* An entry of a port's address table. */
struct address_t {
	std::array<uint8_t, 16> gid{};
	uint64_t mac = 0;
	uint8_t version = ROCE_V2, l3_type = ROCE_IPV4;
	int vlan = -1; /* none */
};

/* A work request under construction. */
struct wr {
	std::vector<uint8_t> raw;

	explicit wr(uint8_t opcode, bool signaled = true, uint32_t imm = 0);
	wr &remote(uint64_t va, uint32_t rkey);
	wr &atomic(uint64_t operand, uint64_t compare);
	wr &sge(uint64_t va, uint32_t lkey, uint32_t len);
	wr &inline_data(const std::string &text);
	wr &datagram(uint32_t qpn, uint32_t qkey, uint16_t lid, bool grh = false);
	wr &datagram(uint32_t qpn, uint32_t qkey, uint8_t address, uint64_t mac, const std::array<uint8_t, 16> &gid);
	wr &solicited();
	wr &fence();
};

enum : uint8_t { acc_lr = 1, acc_lw = 2, acc_rr = 4, acc_rw = 8, acc_a = 16, acc_all = 31 };

class port {
public:
	port(machine &m, uint16_t lid, uint64_t seed = 0, bool ethernet = false);
	~port();
	port(const port &) = delete;
	port &operator=(const port &) = delete;

	/* Commands; the status is that of the command or -1 if it never finished. */
	int command(std::vector<uint8_t> &in, std::vector<uint8_t> &out);
	std::vector<uint8_t> input(uint16_t op, uint32_t object = 0, size_t size = 16);
	int simple(uint16_t op, uint32_t object = 0, uint32_t *result = nullptr);
	void bring_up(); /* event queue for everything, a PD */

	uint32_t alloc_pd();
	eq_t create_eq(uint32_t log, uint32_t vector, uint64_t mask);
	cq_t create_cq(uint32_t log = 8);
	int resize_cq(cq_t &c, uint32_t log, uint64_t *buffer);
	srq_t create_srq(uint32_t log = 4);
	uint32_t reg(uint64_t iova, uint64_t len, uint8_t access, uint32_t pd = 0, uint64_t start = 0, uint32_t log_page = 12);
	uint32_t create_key(uint8_t mode, uint64_t start, uint64_t len, uint8_t access, const std::vector<uint64_t> &xlt,
			    bool free = false, uint32_t log_page = 12, uint32_t octowords = 0);
	qp_t create_qp(cq_t &send, cq_t &recv, const qp_options &o = {}, srq_t *srq = nullptr, uint32_t pd = 0,
		       uint32_t xrcd = 0);
	int modify(qp_t &q, uint16_t op, const qp_options &o, uint16_t dlid = 0, uint32_t dqpn = 0);
	void up(qp_t &q, const qp_options &o = {}, uint16_t dlid = 0, uint32_t dqpn = 0);
	uint32_t state(const qp_t &q);
	int set_address(uint32_t index, const address_t &a);

	/* Queues */
	void post(qp_t &q, const wr &w, bool ring = true);
	void ring(const qp_t &q);
	void recv(qp_t &q, uint64_t va, uint32_t lkey, uint32_t len);
	void recv(srq_t &s, uint64_t va, uint32_t lkey, uint32_t len);
	std::optional<completion> poll(cq_t &c);
	completion expect(cq_t &c, uint8_t opcode); /* fails the test unless it is there */
	completion expect_error(cq_t &c, wc_error error, bool responder = false);
	void arm(cq_t &c, bool solicited = false);
	struct event {
		uint8_t type;
		uint32_t number;
	};
	std::optional<event> poll_event(eq_t &e);
	std::vector<event> events(); /* of the event queue for everything */
	void arm_eq(eq_t &e);
	void mmio(uint64_t offset, uint64_t value, unsigned int size = 8)
	{
		nphca_mmio_write(dev, offset, value, size);
	}
	uint64_t knob(unsigned int k) { return nphca_knob_get(dev, k); }

	machine &mem;
	struct nphca_device *dev;
	const uint16_t lid;
	uint32_t pd = 0, uar = 0;
	eq_t eq;
	uint32_t interrupts = 0, last_vector = 0;

private:
	uint64_t cmdq_ = 0, boxes_ = 0;
};

/* Two ports, a connected pair of RC QPs, a buffer on each side. */
struct pair_fixture : ::testing::Test {
	pair_fixture() { connect({}); }
	void connect(const qp_options &o, const qp_options &responder);
	void connect(const qp_options &o) { connect(o, o); }

	machine m;
	port a{m, 1}, b{m, 2};
	cq_t a_cq, b_cq;
	qp_t aq, bq;
	static constexpr uint32_t size = 256 * 1024;
	uint64_t a_buf = 0, b_buf = 0;
	uint32_t a_key = 0, b_key = 0;
};

} // namespace nphca::test

#endif
