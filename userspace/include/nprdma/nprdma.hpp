/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Move-only C++20 owners of libnprdma's objects. Setup throws
 * std::system_error; the data path is noexcept and returns what C returns.
 * An owner must not outlive the verbs objects that it was made from, nor the owner that it was
 * attached by: a cq that ends before one of its qps stays attached, and its memory is lost.
 */
#ifndef NPRDMA_NPRDMA_HPP
#define NPRDMA_NPRDMA_HPP

#include <nprdma/nprdma.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <span>
#include <system_error>

namespace nprdma {

namespace detail {

struct deleter {
	void operator()(npr_context *p) const noexcept { (void)npr_close(p); }
	void operator()(npr_cq *p) const noexcept { (void)npr_detach_cq(p); }
	void operator()(npr_qp *p) const noexcept { (void)npr_detach_qp(p); }
	void operator()(npr_srq *p) const noexcept { (void)npr_detach_srq(p); }
	void operator()(ibv_mr *p) const noexcept { (void)npr_dereg_mr(p); }
};

template <class T>
using handle = std::unique_ptr<T, deleter>;

[[noreturn]] inline void fail(int error, const char *what)
{
	throw std::system_error(error, std::generic_category(), what);
}

template <class T>
[[nodiscard]] handle<T> own(T *p, const char *what)
{
	if (!p)
		fail(errno, what);
	return handle<T>(p);
}

inline void check(int rc, const char *what)
{
	if (rc < 0)
		fail(-rc, what);
}

} // namespace detail

class qp {
public:
	explicit qp(npr_qp *raw) : raw_(detail::own(raw, "npr_attach_qp")) {}

	[[nodiscard]] int post_send(ibv_send_wr &wr, ibv_send_wr *&bad) noexcept
	{
		return npr_post_send(raw_.get(), &wr, &bad);
	}

	[[nodiscard]] int post_recv(ibv_recv_wr &wr, ibv_recv_wr *&bad) noexcept
	{
		return npr_post_recv(raw_.get(), &wr, &bad);
	}

	/* For ibv_wr_start() and so on. */
	[[nodiscard]] ibv_qp_ex &ex() noexcept { return *npr_qp_to_qp_ex(raw_.get()); }

	npr_region_attr resolve(std::uint32_t rkey)
	{
		npr_region_attr attr{};
		detail::check(npr_resolve(raw_.get(), rkey, &attr), "npr_resolve");
		return attr;
	}

	npr_region_attr resolve(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length)
	{
		npr_region_attr attr{};
		detail::check(npr_resolve_range(raw_.get(), rkey, addr, length, &attr), "npr_resolve_range");
		return attr;
	}

	[[nodiscard]] std::int64_t prefetch(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length,
					    int access) noexcept
	{
		return npr_prefetch(raw_.get(), rkey, addr, length, access);
	}

	/* What is to come: leases of the peer's memory are asked for, or given back. */
	void advise(std::uint32_t rkey, std::uint64_t addr, std::uint64_t length, npr_advice advice)
	{
		detail::check(npr_advise(raw_.get(), rkey, addr, length, advice), "npr_advise");
	}

	[[nodiscard]] npr_stats stats() const noexcept
	{
		npr_stats s{};
		(void)npr_get_stats(raw_.get(), &s, sizeof(s));
		return s;
	}

	[[nodiscard]] npr_qp *get() const noexcept { return raw_.get(); }

private:
	detail::handle<npr_qp> raw_;
};

class cq {
public:
	explicit cq(npr_cq *raw) : raw_(detail::own(raw, "npr_attach_cq")) {}

	[[nodiscard]] qp attach(ibv_qp &verbs, const npr_qp_attr &attr = {})
	{
		return qp(npr_attach_qp(raw_.get(), &verbs, &attr));
	}

	[[nodiscard]] int poll(std::span<ibv_wc> wc) noexcept
	{
		return npr_poll_cq(raw_.get(), static_cast<int>(wc.size()), wc.data());
	}

	/* For ibv_start_poll() and so on. */
	[[nodiscard]] ibv_cq_ex &ex() noexcept { return *npr_cq_to_cq_ex(raw_.get()); }

	[[nodiscard]] int req_notify(bool solicited_only = false) noexcept
	{
		return npr_req_notify_cq(raw_.get(), solicited_only);
	}

	[[nodiscard]] int wait(int timeout_ms = -1) { return npr_wait_cq(raw_.get(), timeout_ms); }
	[[nodiscard]] int fd() const noexcept { return npr_get_fd(raw_.get()); }
	[[nodiscard]] npr_cq *get() const noexcept { return raw_.get(); }

private:
	detail::handle<npr_cq> raw_;
};

class srq {
public:
	explicit srq(npr_srq *raw) : raw_(detail::own(raw, "npr_attach_srq")) {}

	[[nodiscard]] int post_recv(ibv_recv_wr &wr, ibv_recv_wr *&bad) noexcept
	{
		return npr_post_srq_recv(raw_.get(), &wr, &bad);
	}

	[[nodiscard]] npr_srq *get() const noexcept { return raw_.get(); }

private:
	detail::handle<npr_srq> raw_;
};

class context {
public:
	explicit context(ibv_context &verbs, unsigned int flags = 0)
	    : raw_(detail::own(npr_open(&verbs, flags), "npr_open"))
	{
	}

	[[nodiscard]] cq attach(ibv_cq &verbs) { return cq(npr_attach_cq(raw_.get(), &verbs)); }
	[[nodiscard]] srq attach(ibv_srq &verbs) { return srq(npr_attach_srq(raw_.get(), &verbs)); }
	[[nodiscard]] npr_context *get() const noexcept { return raw_.get(); }

private:
	detail::handle<npr_context> raw_;
};

/* An unpinned memory region of our own. */
class region {
public:
	region(ibv_pd &pd, std::span<std::byte> memory, int access)
	    : raw_(detail::own(npr_reg_mr(&pd, memory.data(), memory.size(), access), "npr_reg_mr"))
	{
	}

	[[nodiscard]] ibv_mr *get() const noexcept { return raw_.get(); }
	[[nodiscard]] std::uint32_t rkey() const noexcept { return raw_->rkey; }

	[[nodiscard]] npr_mr_attr query() const
	{
		npr_mr_attr attr{};
		detail::check(npr_query_mr(raw_.get(), &attr), "npr_query_mr");
		return attr;
	}

private:
	detail::handle<ibv_mr> raw_;
};

} // namespace nprdma

#endif // NPRDMA_NPRDMA_HPP
