// SPDX-License-Identifier: GPL-2.0
/*
 * The small driver's commands and queues.
 */
#include "driver.h"

#include <sys/mman.h>

namespace nphca::test {

machine::machine() : rights_(ram_size / page, page_read | page_write)
{
	void *ram = mmap(nullptr, ram_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (ram == MAP_FAILED)
		throw std::runtime_error("no memory for the test machine");
	ram_ = static_cast<uint8_t *>(ram);
	static const nphca_fabric_ops ops = {
		[](void *host) {
			auto *m = static_cast<machine *>(host);
			return m->ticking.load(std::memory_order_relaxed) ? m->ticks.fetch_add(1000000, std::memory_order_relaxed) : m->now;
		},
		[](void *) {},
	};
	fabric = nphca_fabric_new(&ops, this);
}

machine::~machine()
{
	leave();
	nphca_fabric_free(fabric);
	munmap(ram_, ram_size);
}

uint64_t machine::alloc(uint64_t size, uint64_t align)
{
	next_ = (next_ + align - 1) & ~(align - 1);
	const uint64_t iova = next_;
	next_ += size;
	if (next_ > ram_base + ram_size)
		throw std::runtime_error("the test machine is out of memory");
	return iova;
}

void machine::fill(uint64_t iova, size_t len, uint8_t seed)
{
	for (size_t i = 0; i < len; ++i)
		at(iova)[i] = static_cast<uint8_t>(seed + i * 7 + i / 251);
}

bool machine::filled(uint64_t iova, size_t len, uint8_t seed)
{
	for (size_t i = 0; i < len; ++i)
		if (at(iova)[i] != static_cast<uint8_t>(seed + i * 7 + i / 251))
			return false;
	return true;
}

bool machine::dma(uint64_t iova, void *buf, size_t len, bool write)
{
	uint8_t *p = translate(iova, len, write);

	if (!p)
		return false;
	if (write)
		std::memcpy(p, buf, len);
	else
		std::memcpy(buf, p, len);
	return true;
}

/* What cannot be posted is not counted: it comes again at once. */
void *machine::target(uint64_t iova, size_t len)
{
	return unpostable ? nullptr : translate(iova, len, true);
}

uint8_t *machine::translate(uint64_t iova, size_t len, bool write)
{
	++requests_done;
	if (record)
		requests.push_back({iova, len, write});
	if (iova < ram_base || iova - ram_base >= ram_size || len > ram_size - (iova - ram_base))
		return nullptr;
	const uint64_t n = (iova - ram_base) / page;
	if (!(rights_[n] & (write ? page_write : page_read)))
		return nullptr;
	if (on_dma)
		on_dma(iova, len, write);
	const auto there = moved_.find(n);
	return (there == moved_.end() ? ram_ + n * page : at(there->second)) + iova % page;
}

void machine::join(machine &other)
{
	static const nphca_link_ops ops = {
		[](void *host, const void *data, size_t size) {
			machine *to = static_cast<machine *>(host)->other_;
			if (!to || to->dead)
				return -1;
			if (to->arriving.size() >= to->room)
				return 0;
			const auto *p = static_cast<const uint8_t *>(data);
			to->arriving.emplace_back(p, p + size);
			return 1;
		},
		[](void *host, void *data, size_t size) {
			auto &queue = static_cast<machine *>(host)->arriving;
			if (queue.empty())
				return size_t{0};
			const std::vector<uint8_t> first = std::move(queue.front());
			queue.pop_front();
			std::memcpy(data, first.data(), std::min(size, first.size()));
			return first.size();
		},
	};
	other_ = &other;
	other.other_ = this;
	other.now = now;
	for (machine *m : {this, &other})
		nphca_fabric_join(m->fabric, &ops, m);
}

void machine::leave()
{
	if (other_)
		other_->other_ = nullptr;
	other_ = nullptr;
}

/* One round of all who run: the next deadline. */
uint64_t machine::poll(bool *more)
{
	uint64_t first = UINT64_MAX;

	*more = false;
	for (machine *m : {this, other_}) {
		uint64_t deadline;
		if (!m || m->stopped)
			continue;
		*more |= nphca_fabric_poll(m->fabric, &deadline);
		first = std::min(first, deadline);
	}
	for (machine *m : {this, other_})
		*more |= m && !m->stopped && !m->arriving.empty();
	return first;
}

void machine::run()
{
	int quiet = 0;
	bool more;
	/* A bound, so that a loop in the core fails a test and does not hang it. */
	for (int i = 0; i < 2000000; ++i) {
		poll(&more);
		quiet = more ? 0 : quiet + 1;
		/* What one has taken makes room for what the other has to send. */
		if (quiet > (other_ ? 1 : 0))
			return;
	}
	FAIL() << "the fabric does not come to rest";
}

void machine::run_for(uint64_t ns)
{
	const uint64_t end = now + ns;
	bool more;
	for (int i = 0; i < 100000; ++i) {
		run();
		const uint64_t deadline = poll(&more);
		if (more)
			continue;
		if (deadline > end)
			break;
		now = std::max(now, deadline);
		if (other_)
			other_->now = now;
	}
	now = end;
	if (other_)
		other_->now = now;
}

/* Work requests */

wr::wr(uint8_t opcode, bool signaled, uint32_t imm) : raw(16)
{
	raw[3] = opcode;
	raw[11] = signaled ? wqe_ce_always : 0;
	store32(&raw[12], imm);
}

wr &wr::remote(uint64_t va, uint32_t rkey)
{
	const size_t n = raw.size();
	raw.resize(n + 16);
	store64(&raw[n], va);
	store32(&raw[n + 8], rkey);
	return *this;
}

wr &wr::atomic(uint64_t operand, uint64_t compare)
{
	const size_t n = raw.size();
	raw.resize(n + 16);
	store64(&raw[n], operand);
	store64(&raw[n + 8], compare);
	return *this;
}

wr &wr::sge(uint64_t va, uint32_t lkey, uint32_t len)
{
	const size_t n = raw.size();
	raw.resize(n + 16);
	store32(&raw[n], len);
	store32(&raw[n + 4], lkey);
	store64(&raw[n + 8], va);
	return *this;
}

wr &wr::inline_data(const std::string &text)
{
	const size_t n = raw.size();
	raw.resize(n + ((4 + text.size() + 15) & ~size_t{15}));
	store32(&raw[n], seg_inline | static_cast<uint32_t>(text.size()));
	std::copy(text.begin(), text.end(), raw.begin() + static_cast<ptrdiff_t>(n + 4));
	return *this;
}

wr &wr::datagram(uint32_t qpn, uint32_t qkey, uint16_t lid, bool grh)
{
	const size_t n = raw.size();
	raw.resize(n + 48);
	store32(&raw[n], qkey);
	store32(&raw[n + 8], qpn | av_extended);
	store16(&raw[n + 14], lid);
	if (grh)
		store32(&raw[n + 28], av_grh);
	return *this;
}

wr &wr::datagram(uint32_t qpn, uint32_t qkey, uint8_t address, uint64_t mac, const std::array<uint8_t, 16> &gid)
{
	constexpr uint8_t traffic_class = 0x22, hop_limit = 7;
	const size_t n = raw.size();

	datagram(qpn, qkey, 0xc123);
	store16(&raw[n + 20], static_cast<uint16_t>(mac >> 32));
	store32(&raw[n + 22], static_cast<uint32_t>(mac));
	raw[n + 26] = traffic_class;
	raw[n + 27] = hop_limit;
	store32(&raw[n + 28], uint32_t{address} << 20);
	std::copy(gid.begin(), gid.end(), raw.begin() + static_cast<ptrdiff_t>(n + 32));
	return *this;
}

wr &wr::solicited()
{
	raw[11] |= wqe_solicited;
	return *this;
}

wr &wr::fence()
{
	raw[11] |= 2 << 5;
	return *this;
}

/* Ports */

port::port(machine &m, uint16_t l, uint64_t seed, bool ethernet) : mem(m), lid(l)
{
	static const nphca_host_ops ops = {
		[](void *host, uint64_t iova, void *buf, size_t len) {
			return static_cast<port *>(host)->mem.dma(iova, buf, len, false) ? 0 : -1;
		},
		[](void *host, uint64_t iova, const void *buf, size_t len) {
			return static_cast<port *>(host)->mem.dma(iova, const_cast<void *>(buf), len, true) ? 0 : -1;
		},
		[](void *host, unsigned int vector) {
			auto *p = static_cast<port *>(host);
			++p->interrupts;
			p->last_vector = vector;
		},
		[](void *host, uint64_t ns) { static_cast<port *>(host)->mem.now += ns; },
		nullptr,
		[](void *host, uint64_t iova, size_t len) { return static_cast<port *>(host)->mem.target(iova, len); },
		[](void *, void *target, const void *buf, size_t len) { std::memcpy(target, buf, len); },
	};
	const nphca_config config = {l, 0, seed, ethernet};
	dev = nphca_device_new(m.fabric, &config, &ops, this);
	if (!dev)
		throw std::runtime_error("no port");
	cmdq_ = m.alloc(4096);
	boxes_ = m.alloc(2 * 512 * 1024, 1024);
	mmio(seg_cmdq_high, __builtin_bswap32(static_cast<uint32_t>(cmdq_ >> 32)), 4);
	mmio(seg_cmdq_low, __builtin_bswap32(static_cast<uint32_t>(cmdq_)), 4);
	bring_up();
}

port::~port()
{
	nphca_device_free(dev);
}

std::vector<uint8_t> port::input(uint16_t op, uint32_t object, size_t n)
{
	std::vector<uint8_t> in(n);
	set(in, cmd_opcode, op);
	set(in, cmd_object, object);
	return in;
}

int port::command(std::vector<uint8_t> &in, std::vector<uint8_t> &out)
{
	uint8_t *entry = mem.at(cmdq_);
	uint64_t box = boxes_;
	const auto chain = [&](const std::vector<uint8_t> &data) {
		uint64_t first = 0;
		for (size_t done = 16; done < data.size(); done += 512) {
			const size_t n = std::min<size_t>(512, data.size() - done);
			std::memset(mem.at(box), 0, 576);
			std::memcpy(mem.at(box), data.data() + done, n);
			if (!first)
				first = box;
			else
				store64(mem.at(box - 1024) + 560, box);
			box += 1024;
		}
		return first;
	};

	std::memset(entry, 0, 64);
	store32(entry + 4, static_cast<uint32_t>(in.size()));
	std::memcpy(entry + 16, in.data(), std::min<size_t>(16, in.size()));
	store64(entry + 8, chain(in));
	const uint64_t out_box = chain(out);
	store64(entry + 48, out_box);
	store32(entry + 56, static_cast<uint32_t>(out.size()));
	entry[63] = 1;
	mmio(seg_doorbell, __builtin_bswap32(1), 4);
	mem.run();
	if (entry[63] & 1)
		return -1;
	std::memcpy(out.data(), entry + 32, std::min<size_t>(16, out.size()));
	for (size_t done = 16, i = 0; done < out.size(); done += 512, ++i)
		std::memcpy(out.data() + done, mem.at(out_box + i * 1024), std::min<size_t>(512, out.size() - done));
	return out[0];
}

int port::simple(uint16_t op, uint32_t object, uint32_t *result)
{
	auto in = input(op, object);
	std::vector<uint8_t> out(16);
	const int status = command(in, out);
	if (result)
		*result = get32(out, cmd_object);
	return status;
}

uint32_t port::alloc_pd()
{
	uint32_t n = 0;
	EXPECT_EQ(simple(OP_ALLOC_PD, 0, &n), 0);
	return n;
}

void port::bring_up()
{
	ASSERT_EQ(simple(OP_ENABLE_HCA), 0);
	ASSERT_EQ(simple(OP_ALLOC_UAR, 0, &uar), 0);
	eq = create_eq(8, 0, ~0ull & ~(1ull << EV_COMMAND));
	pd = alloc_pd();
}

static void put_pages(std::vector<uint8_t> &in, uint64_t iova, uint64_t size)
{
	for (uint64_t off = 0; off < size; off += 4096) {
		in.resize(in.size() + 8);
		store64(&in[in.size() - 8], iova + off);
	}
}

eq_t port::create_eq(uint32_t log, uint32_t vector, uint64_t mask)
{
	eq_t e;
	e.log = log;
	e.buffer = mem.alloc(64ull << log);
	for (uint32_t i = 0; i < 1u << log; ++i)
		mem.at(e.buffer)[64 * i + 63] = 1;
	auto in = input(OP_CREATE_EQ, 0, cmd_in_pas);
	const bytes ctx = part(bytes(in), cmd_in_ctx);
	set(ctx, eqc_log_eq_size, log);
	set(ctx, eqc_intr, vector);
	store64(&in[cmd_in_eq_mask], mask);
	put_pages(in, e.buffer, 64ull << log);
	std::vector<uint8_t> out(16);
	EXPECT_EQ(command(in, out), 0);
	e.eqn = get32(out, cmd_out_eqn);
	return e;
}

static void empty_cq(machine &m, uint64_t buffer, uint32_t log)
{
	for (uint32_t i = 0; i < 1u << log; ++i)
		m.at(buffer)[64 * i + 63] = 0xf1;
}

cq_t port::create_cq(uint32_t log)
{
	cq_t c;
	c.log = log;
	c.buffer = mem.alloc(64ull << log);
	c.dbr = mem.alloc(64, 64);
	empty_cq(mem, c.buffer, log);
	auto in = input(OP_CREATE_CQ, 0, cmd_in_pas);
	const bytes ctx = part(bytes(in), cmd_in_ctx);
	set(ctx, cqc_log_cq_size, log);
	set(ctx, cqc_c_eqn_or_apu_element, eq.eqn);
	set(ctx, cqc_dbr_addr, c.dbr);
	put_pages(in, c.buffer, 64ull << log);
	std::vector<uint8_t> out(16);
	EXPECT_EQ(command(in, out), 0);
	c.cqn = get32(out, cmd_object);
	return c;
}

int port::resize_cq(cq_t &c, uint32_t log, uint64_t *buffer)
{
	*buffer = mem.alloc(64ull << log);
	empty_cq(mem, *buffer, log);
	auto in = input(OP_MODIFY_CQ, c.cqn, cmd_in_pas);
	set(in, cmd_op_mod, 1);
	const bytes ctx = part(bytes(in), cmd_in_ctx);
	set(ctx, cqc_log_cq_size, log);
	put_pages(in, *buffer, 64ull << log);
	std::vector<uint8_t> out(16);
	return command(in, out);
}

srq_t port::create_srq(uint32_t log)
{
	srq_t s;
	s.log = log;
	s.buffer = mem.alloc(64ull << log);
	s.dbr = mem.alloc(64, 64);
	for (uint32_t i = 0; i < 1u << log; ++i)
		store16(mem.at(s.buffer + 64 * i + 2), static_cast<uint16_t>((i + 1) & ((1u << log) - 1)));
	auto in = input(OP_CREATE_RMP, 0, cmd_in_pas);
	const bytes wq = part(bytes(in), cmd_in_rmpc + 48);
	set(wq, wq_log_wq_sz, log);
	set(wq, wq_log_wq_stride, 6);
	set(wq, wq_dbr_addr, s.dbr);
	set(wq, wq_pd, pd);
	put_pages(in, s.buffer, 64ull << log);
	std::vector<uint8_t> out(16);
	EXPECT_EQ(command(in, out), 0);
	s.srqn = get32(out, cmd_object);
	return s;
}

uint32_t port::create_key(uint8_t mode, uint64_t start, uint64_t len, uint8_t access, const std::vector<uint64_t> &xlt,
			  bool free, uint32_t log_page, uint32_t octowords)
{
	auto in = input(OP_CREATE_MKEY, 0, cmd_in_pas);
	const bytes c = part(bytes(in), cmd_in_ctx, mkc_size);
	const auto words = static_cast<uint32_t>(xlt.size());
	set(c, mkc_free, free);
	set(c, mkc_umr_en, 1);
	set(c, mkc_lr, access & acc_lr ? 1 : 0);
	set(c, mkc_lw, access & acc_lw ? 1 : 0);
	set(c, mkc_rr, access & acc_rr ? 1 : 0);
	set(c, mkc_rw, access & acc_rw ? 1 : 0);
	set(c, mkc_a, access & acc_a ? 1 : 0);
	set(c, mkc_access_mode_1_0, mode);
	set(c, mkc_qpn, 0xffffff);
	set(c, mkc_mkey_7_0, 0x5a);
	set(c, mkc_pd, pd);
	set(c, mkc_start_addr, start);
	set(c, mkc_len, len);
	set(c, mkc_en_rinval, 1);
	set(c, mkc_log_page_size, log_page);
	set(c, mkc_translations_octword_size, octowords ? octowords : (words + 1) / 2);
	set(in, create_mkey_in_translations_octword_actual_size, (words + 1) / 2);
	for (const uint64_t w : xlt) {
		in.resize(in.size() + 8);
		store64(&in[in.size() - 8], w);
	}
	in.resize((in.size() + 15) & ~size_t{15});
	std::vector<uint8_t> out(16);
	EXPECT_EQ(command(in, out), 0);
	return get32(out, cmd_object) << 8 | 0x5a;
}

uint32_t port::reg(uint64_t iova, uint64_t len, uint8_t access, uint32_t in_pd, uint64_t start, uint32_t log_page)
{
	const uint64_t ps = 1ull << log_page, first = iova & ~(ps - 1);
	std::vector<uint64_t> pages;
	for (uint64_t p = first; p < iova + len; p += ps)
		pages.push_back(p);
	const uint32_t saved = pd;
	if (in_pd)
		pd = in_pd;
	const uint32_t key = create_key(MKEY_MTT, start ? start : iova, len, access, pages, false, log_page);
	pd = saved;
	return key;
}

qp_t port::create_qp(cq_t &send, cq_t &recv_cq, const qp_options &o, srq_t *srq, uint32_t in_pd,
		     uint32_t xrcd)
{
	qp_t q;
	q.st = o.st;
	q.pd = in_pd ? in_pd : pd;
	q.send = &send;
	q.recv = &recv_cq;
	q.srq = srq;
	const uint64_t rq = srq ? 0 : 64ull << q.log_rq, bytes_all = rq + (64ull << q.log_sq);
	q.buffer = mem.alloc(bytes_all);
	q.dbr = mem.alloc(64, 64);
	auto in = input(OP_CREATE_QP, 0, cmd_in_pas);
	const bytes c = part(bytes(in), cmd_in_qpc, qpc_size);
	set(c, qpc_st, o.st);
	set(c, qpc_pd, q.pd);
	set(c, qpc_log_sq_size, q.log_sq);
	set(c, qpc_log_rq_size, srq ? 0 : q.log_rq);
	set(c, qpc_log_rq_stride, 2);
	set(c, qpc_rq_type, srq ? RQ_SRQ : RQ_REGULAR);
	set(c, qpc_srqn_rmpn_xrqn, srq ? srq->srqn : 0);
	set(c, qpc_cqn_snd, send.cqn);
	set(c, qpc_cqn_rcv, recv_cq.cqn);
	set(c, qpc_dbr_addr, q.dbr);
	set(c, qpc_user_index, 0xffffff);
	set(c, qpc_xrcd, xrcd);
	put_pages(in, q.buffer, bytes_all);
	std::vector<uint8_t> out(16);
	EXPECT_EQ(command(in, out), 0);
	q.qpn = get32(out, cmd_object);
	return q;
}

int port::modify(qp_t &q, uint16_t op, const qp_options &o, uint16_t dlid, uint32_t dqpn)
{
	auto in = input(op, q.qpn, cmd_in_pas);
	const bytes c = part(bytes(in), cmd_in_qpc, qpc_size);
	const bytes path = part(c, qpc_primary_address_path.bit / 8, ads_size);
	set(c, qpc_rre, o.read);
	set(c, qpc_rwe, o.write);
	set(c, qpc_rae, o.atomic);
	set(c, qpc_q_key, o.qkey);
	set(c, qpc_mtu, o.mtu);
	set(c, qpc_remote_qpn, dqpn);
	set(c, qpc_next_rcv_psn, o.psn);
	set(c, qpc_next_send_psn, o.psn);
	set(c, qpc_log_rra_max, o.log_max_rd);
	set(c, qpc_log_sra_max, o.log_max_rd);
	set(c, qpc_min_rnr_nak, o.rnr_timer);
	set(c, qpc_retry_count, o.retry);
	set(c, qpc_rnr_retry, o.rnr_retry);
	set(path, ads_rlid, dlid);
	set(path, ads_ack_timeout, o.timeout);
	set(path, ads_vhca_port_num, 1);
	set(path, ads_src_addr_index, o.address);
	set(path, ads_rmac, o.mac);
	set(path, ads_udp_sport, o.sport);
	std::copy(o.gid.begin(), o.gid.end(), path.begin() + ads_rgid_rip.bit / 8);
	std::vector<uint8_t> out(16);
	return command(in, out);
}

void port::up(qp_t &q, const qp_options &o, uint16_t dlid, uint32_t dqpn)
{
	ASSERT_EQ(modify(q, OP_RST2INIT_QP, o, dlid, dqpn), 0);
	ASSERT_EQ(modify(q, OP_INIT2RTR_QP, o, dlid, dqpn), 0);
	ASSERT_EQ(modify(q, OP_RTR2RTS_QP, o, dlid, dqpn), 0);
}

int port::set_address(uint32_t index, const address_t &a)
{
	auto in = input(OP_SET_ROCE_ADDRESS, 0, 16 + roce_address_size);
	const bytes c = part(bytes(in), 16);
	set(in, set_roce_address_in_index, index);
	std::copy(a.gid.begin(), a.gid.end(), c.begin());
	set(c, roce_addr_mac, a.mac);
	set(c, roce_addr_version, a.version);
	set(c, roce_addr_l3_type, a.l3_type);
	set(c, roce_addr_vlan_valid, a.vlan >= 0);
	set(c, roce_addr_vlan_id, a.vlan >= 0 ? static_cast<uint64_t>(a.vlan) : 0);
	std::vector<uint8_t> out(16);
	return command(in, out);
}

uint32_t port::state(const qp_t &q)
{
	auto in = input(OP_QUERY_QP, q.qpn);
	std::vector<uint8_t> out(cmd_in_pas);
	EXPECT_EQ(command(in, out), 0);
	return get32(part(const_bytes(out), cmd_in_qpc), qpc_state);
}

void port::post(qp_t &q, const wr &w, bool now)
{
	std::vector<uint8_t> raw = w.raw;
	const auto ds = static_cast<uint32_t>(raw.size() / 16);
	raw[1] = static_cast<uint8_t>(q.sq_pi >> 8);
	raw[2] = static_cast<uint8_t>(q.sq_pi);
	store32(&raw[4], q.qpn << 8 | ds);
	raw.resize((raw.size() + 63) & ~size_t{63});
	const uint64_t sq = q.buffer + (q.srq ? 0 : 64ull << q.log_rq);
	for (size_t i = 0; i < raw.size(); i += 64) {
		std::memcpy(mem.at(sq + 64 * (q.sq_pi & ((1u << q.log_sq) - 1))), &raw[i], 64);
		++q.sq_pi;
	}
	if (now)
		ring(q);
}

void port::ring(const qp_t &q)
{
	store32(mem.at(q.dbr + 4), q.sq_pi);
	mmio((uint64_t{uar} << 12) + uar_sq, uint64_t{__builtin_bswap32(q.qpn << 8)} << 32);
}

static void put_recv(uint8_t *wqe, uint64_t va, uint32_t lkey, uint32_t len)
{
	store32(wqe, len);
	store32(wqe + 4, lkey);
	store64(wqe + 8, va);
	store32(wqe + 16, 0);
	store32(wqe + 20, key_terminate);
}

void port::recv(qp_t &q, uint64_t va, uint32_t lkey, uint32_t len)
{
	put_recv(mem.at(q.buffer + 64 * (q.rq_pi & ((1u << q.log_rq) - 1))), va, lkey, len);
	store32(mem.at(q.dbr), ++q.rq_pi);
}

/* Only as long as the list of free entries is the initial one. */
void port::recv(srq_t &s, uint64_t va, uint32_t lkey, uint32_t len)
{
	put_recv(mem.at(s.buffer + 64 * (s.posted & ((1u << s.log) - 1)) + 16), va, lkey, len);
	store32(mem.at(s.dbr), ++s.posted);
}

std::optional<completion> port::poll(cq_t &c)
{
	const uint8_t *e = mem.at(c.buffer + 64 * (c.ci & ((1u << c.log) - 1)));
	if (e[63] >> 4 == 15 || (e[63] & 1) != ((c.ci >> c.log) & 1))
		return std::nullopt;
	completion r{};
	r.opcode = e[63] >> 4;
	r.vendor = e[54];
	r.syndrome = r.opcode >= CQE_REQ_ERR ? e[55] : 0;
	r.imm = load32(e + 36);
	r.byte_count = load32(e + 44);
	r.slid = load16(e + 22);
	r.remote_qpn = load32(e + 24) & 0xffffff;
	r.grh = load32(e + 24) >> 28 & 3;
	r.sl = load32(e + 24) >> 24 & 0xf;
	r.tagged = e[29] & 1;
	r.tag = load16(e + 30);
	r.uidx = load32(e + 32);
	r.wqe_opcode = e[56];
	r.qpn = load32(e + 56) & 0xffffff;
	r.counter = load16(e + 60);
	++c.ci;
	store32(mem.at(c.dbr), c.ci & 0xffffff);
	return r;
}

completion port::expect(cq_t &c, uint8_t opcode)
{
	mem.run();
	const auto e = poll(c);
	if (!e) {
		ADD_FAILURE() << "port " << lid << ": no completion";
		return {};
	}
	EXPECT_EQ(e->opcode, opcode) << "syndrome " << int{e->syndrome};
	return *e;
}

completion port::expect_error(cq_t &c, wc_error error, bool responder)
{
	mem.run();
	const auto e = poll(c);
	if (!e) {
		ADD_FAILURE() << "port " << lid << ": no completion";
		return {};
	}
	EXPECT_EQ(e->opcode, responder ? CQE_RESP_ERR : CQE_REQ_ERR);
	EXPECT_EQ(e->syndrome, static_cast<uint8_t>(error));
	return *e;
}

void port::arm(cq_t &c, bool solicited)
{
	const uint32_t word = (c.arm_sn++ & 3) << 28 | (solicited ? 1u << 24 : 0) | (c.ci & 0xffffff);
	mmio((uint64_t{uar} << 12) + uar_cq_arm, __builtin_bswap32(word) | uint64_t{__builtin_bswap32(c.cqn)} << 32);
	mem.run();
}

void port::arm_eq(eq_t &e)
{
	mmio((uint64_t{uar} << 12) + uar_eq_arm, __builtin_bswap32(e.eqn << 24 | (e.ci & 0xffffff)), 4);
	mem.run();
}

std::optional<port::event> port::poll_event(eq_t &e)
{
	const uint8_t *p = mem.at(e.buffer + 64 * (e.ci & ((1u << e.log) - 1)));
	if ((p[63] & 1) != ((e.ci >> e.log) & 1))
		return std::nullopt;
	++e.ci;
	return event{p[1], p[1] == EV_CQ_ERROR ? load32(p + 32) : load32(p + 56)};
}

std::vector<port::event> port::events()
{
	std::vector<event> all;
	mem.run();
	while (const auto e = poll_event(eq))
		all.push_back(*e);
	arm_eq(eq);
	return all;
}

void pair_fixture::connect(const qp_options &o, const qp_options &responder)
{
	a_cq = a.create_cq();
	b_cq = b.create_cq();
	aq = a.create_qp(a_cq, a_cq, o);
	bq = b.create_qp(b_cq, b_cq, responder);
	a.up(aq, o, b.lid, bq.qpn);
	b.up(bq, responder, a.lid, aq.qpn);
	a_buf = m.alloc(size);
	b_buf = m.alloc(size);
	a_key = a.reg(a_buf, size, acc_all);
	b_key = b.reg(b_buf, size, acc_all);
}

} // namespace nphca::test
