/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One function of the HCA: its registers, its objects by number, its one port.
 *
 * All but the atomics at the end belongs to the polling thread.
 */
#ifndef NPHCA_DEVICE_H
#define NPHCA_DEVICE_H

#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bits.h"
#include "fabric.h"
#include "nphca.h"
#include "posted.h"
#include "queues.h"
#include "mkey.h"
#include "qp.h"

namespace nphca {

/*
 * Objects by number. Numbers are handed out in turn, so that one is not used
 * again at once: a late packet or doorbell finds nothing, not a newcomer.
 */
template <typename T>
class table {
public:
	table(uint32_t first, uint32_t last) : first_(first), last_(last), next_(first) {}

	[[nodiscard]] T *find(uint32_t n) const noexcept
	{
		return n >= first_ && n - first_ < slots_.size() ? slots_[n - first_].get() : nullptr;
	}
	/* The number taken, 0 if there is none. */
	uint32_t add(std::unique_ptr<T> object)
	{
		if (count_ > last_ - first_)
			return 0;
		while (find(next_))
			step();
		const uint32_t n = next_;
		if (n - first_ >= slots_.size())
			slots_.resize(n - first_ + 1);
		slots_[n - first_] = std::move(object);
		++count_;
		step();
		return n;
	}
	std::unique_ptr<T> remove(uint32_t n) noexcept
	{
		if (!find(n))
			return nullptr;
		--count_;
		return std::move(slots_[n - first_]);
	}
	void clear() noexcept
	{
		slots_.clear();
		count_ = 0;
		next_ = first_;
	}
	/* The next number is the @n th, if it is free. */
	void start(uint64_t n) noexcept { next_ = first_ + static_cast<uint32_t>(n % (last_ - first_ + 1)); }
	[[nodiscard]] size_t size() const noexcept { return count_; }
	template <typename F>
	void each(F &&f)
	{
		for (auto &slot : slots_)
			if (slot)
				f(*slot);
	}

private:
	void step() noexcept { next_ = next_ == last_ ? first_ : next_ + 1; }

	std::vector<std::unique_ptr<T>> slots_;
	uint32_t first_, last_, next_;
	uint32_t count_ = 0;
};

/* Into the table with @object: it learns its number, and so does the command's answer. */
template <class T>
cmd_status enlist(table<T> &all, std::unique_ptr<T> object, uint32_t T::*number, bytes out, field at = cmd_object)
{
	T *p = object.get();
	const uint32_t n = all.add(std::move(object));

	if (!n)
		return cmd_status::no_resource;
	p->*number = n;
	set(out, at, n);
	return cmd_status::ok;
}

/* Objects that have a number and users, and nothing else. */
struct plain_object {
	uint32_t users = 0;
};

struct command; /* command.cpp */

class device {
public:
	device(fabric &f, uint16_t lid, const nphca_config &config, const nphca_host_ops &ops, void *host);
	~device();
	device(const device &) = delete;
	device &operator=(const device &) = delete;

	/* Any thread */
	uint64_t mmio_read(uint64_t offset, uint32_t size) noexcept;
	void mmio_write(uint64_t offset, uint64_t value, uint32_t size) noexcept;
	uint64_t knob_get(uint32_t knob) const noexcept;
	bool knob_set(uint32_t knob, uint64_t value) noexcept;

	/* Polling thread */
	void reset() noexcept;
	void handle_posting(const posting &p);
	void receive(packet &p);
	void count(nphca_knob counter, uint64_t n = 1) noexcept
	{
		knobs_[counter].fetch_add(n, std::memory_order_relaxed); /* statistics only */
	}
	[[nodiscard]] uint64_t knob(nphca_knob k) const noexcept
	{
		return knobs_[k].load(std::memory_order_relaxed); /* read afresh often enough */
	}
	void log(int level, const char *format, ...) noexcept __attribute__((format(printf, 3, 4)));

	/* One or more DMA requests; false on the first that faults. */
	[[nodiscard]] bool dma_read(uint64_t iova, void *buf, size_t len) noexcept;
	[[nodiscard]] bool dma_write(uint64_t iova, const void *buf, size_t len) noexcept;
	[[nodiscard]] uint64_t random() noexcept;

	/* mkey.cpp: access memory through a key */
	[[nodiscard]] mem_result check_key(uint32_t key, uint64_t va, uint64_t len, uint8_t need,
					   const accessor &who, const mkey **found) noexcept;
	[[nodiscard]] mem_result access(uint32_t key, uint64_t va, uint8_t *buf, uint64_t len, bool write, uint8_t need,
					const accessor &who) noexcept;
	[[nodiscard]] mem_result copy(const mkey &m, uint64_t va, uint8_t *buf, uint64_t len, bool write,
				      int depth) noexcept;
	mkey *find_mkey(uint32_t key) noexcept;
	/* A UMR work request; @wqe is the whole of it. */
	[[nodiscard]] wc_error umr(const qp &q, const_bytes wqe) noexcept;

	/* queues.cpp */
	void post_event(uint8_t type, uint8_t subtype, const_bytes data) noexcept;
	void qp_event(const qp &q, uint8_t type) noexcept;
	void complete(uint32_t cqn, const cqe &e) noexcept;
	void arm_cq(uint32_t cqn, uint32_t word) noexcept;
	void update_eq(uint32_t eqn, uint32_t ci, bool arm) noexcept;

	fabric &fab;
	const uint16_t lid;
	const uint64_t guid;
	const bool ethernet;
	[[nodiscard]] uint64_t mac() const noexcept { return 0x024e50000000ull | lid; }
	/* NULL: there is no such address. */
	[[nodiscard]] const roce_address *address(uint64_t index) const noexcept
	{
		return index < addresses.size() && addresses[index].valid ? &addresses[index] : nullptr;
	}

	table<plain_object> pds{1, 0xffff}, xrcds{1, 0xffff}, uars{first_uar, (NPHCA_BAR0_SIZE >> 12) - 1},
		counters{1, 255}, domains{1, 0xffff};
	table<mkey> mkeys{2, (1u << 20) - 1};
	table<eq> eqs{1, 63};
	table<cq> cqs{1, (1u << 16) - 1};
	table<srq> srqs{1, (1u << 16) - 1};
	table<qp> qps{0x40, (1u << 17) - 1};
	uint32_t special_qp[2] = {0, 0};
	std::multimap<gid_bytes, uint32_t> multicast;
	std::array<roce_address, roce_addresses> addresses; /* Ethernet */
	size_t xlt_words = 0; /* of all mkeys */
	posted_writes posted; /* any thread commits */

private:
	template <class P>
	bool dma(int (*op)(void *host, uint64_t iova, P *buf, size_t len), uint64_t iova, P *buf, size_t len) noexcept;
	template <class P>
	bool request(int (*op)(void *host, uint64_t iova, P *buf, size_t len), uint64_t iova, P *buf, size_t len) noexcept;
	size_t cut(uint64_t iova, size_t len, bool *split) noexcept;
	bool post_write(uint64_t iova, const void *buf, size_t len) noexcept;
	void notify(uint32_t vector) noexcept;

	/* command.cpp */
	void run_commands(uint32_t doorbell) noexcept;
	bool run_command(uint32_t slot) noexcept;
	cmd_status execute(const_bytes in, bytes out);
	void caps(uint16_t type, bytes cap) noexcept;
	cmd_status access_register(const_bytes in, bytes out);
	cmd_status query_vport(uint16_t op, const_bytes in, bytes out);
	cmd_status cmd_nic(uint16_t op, const_bytes in, bytes out);
	[[nodiscard]] bool is_for_us(const packet &p) const noexcept;
	cmd_status cmd_mkey(uint16_t op, const_bytes in, bytes out);
	cmd_status cmd_eq(uint16_t op, const_bytes in, bytes out);
	cmd_status cmd_cq(uint16_t op, const_bytes in, bytes out);
	cmd_status cmd_srq(uint16_t op, const_bytes in, bytes out);
	cmd_status cmd_rmp(uint16_t op, const_bytes in, bytes out);
	cmd_status cmd_qp(uint16_t op, const_bytes in, bytes out);
	cmd_status create_qp(const_bytes in, bytes out);
	cmd_status modify_qp(uint16_t op, qp &q, const_bytes in);
	cmd_status query_qp(qp &q, bytes out);
	cmd_status mad_ifc(const_bytes in, bytes out);
	uint8_t eq_of_event(uint8_t type) noexcept;
	void write_eqe(eq &e, uint8_t type, uint8_t subtype, const_bytes data) noexcept;
	void write_cqe(cq &c, const cqe &e) noexcept;

	void start_numbers() noexcept;

	nphca_host_ops ops_;
	void *host_;
	uint64_t seed_;
	uint32_t issi_ = 0;
	bool roce_enabled_ = false;
	bool atomic_host_endian_ = true;
	std::array<uint8_t, 64> node_desc_{};
	uint64_t random_ = 0x9e3779b97f4a7c15ull; /* xorshift */
	uint32_t half_word_ = 0; /* first half of a 64-bit register written in two */

	/* Shared with the vCPUs: written by their register writes, relaxed, as registers are. */
	std::atomic<uint32_t> cmdq_high_{0}, cmdq_low_{0};
	std::array<std::atomic<uint64_t>, NPHCA_KNOBS> knobs_{};
};

} // namespace nphca

#endif
