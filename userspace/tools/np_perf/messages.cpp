// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "messages.hpp"

#include <fmt/format.h>

#include <type_traits>

namespace perf
{

namespace
{

class writer
{
public:
	explicit writer(kind k)
	{
		put(wire_magic);
		put(wire_version);
		put(static_cast<std::uint16_t>(k));
		put(std::uint32_t{0});
	}

	template <class T> void put(T v)
	{
		static_assert(std::is_unsigned_v<T>);
		for (std::size_t i = sizeof(T); i-- > 0;)
			bytes_.push_back(static_cast<std::byte>(v >> 8 * i & 0xff));
	}
	template <class... T> void put_all(T... v) { (put(v), ...); }

	[[nodiscard]] std::vector<std::byte> take()
	{
		const std::size_t length = bytes_.size() - head_bytes;

		for (std::size_t i = 0; i < 4; i++)
			bytes_[head_bytes - 1 - i] = static_cast<std::byte>(length >> 8 * i & 0xff);
		return std::move(bytes_);
	}

private:
	std::vector<std::byte> bytes_;
};

class reader
{
public:
	reader(std::span<const std::byte> bytes, const char *what) : rest_(bytes), what_(what) {}

	template <class T> T get()
	{
		T v = 0;

		if (rest_.size() < sizeof(T))
			throw bad_message(fmt::format("{}: too short", what_));
		for (std::size_t i = 0; i < sizeof(T); i++)
			v = static_cast<T>(static_cast<T>(v << 8) | std::to_integer<T>(rest_[i]));
		rest_ = rest_.subspan(sizeof(T));
		return v;
	}
	/* In [@low, @high]. */
	template <class T> T get(const char *name, T low, T high)
	{
		const T v = get<T>();

		if (v < low || v > high)
			throw bad_message(
			    fmt::format("{}: {} is {}, not {} to {}", what_, name, v, low, high));
		return v;
	}
	template <class E, std::size_t N>
	E get(const std::array<std::string_view, N> &names, const char *name)
	{
		return static_cast<E>(
		    get<std::uint8_t>(name, 0, static_cast<std::uint8_t>(names.size() - 1)));
	}
	bool get_flag(const char *name) { return get<std::uint8_t>(name, 0, 1) != 0; }

	void end() const
	{
		if (!rest_.empty())
			throw bad_message(fmt::format("{}: {} bytes too long", what_, rest_.size()));
	}

private:
	std::span<const std::byte> rest_;
	const char *what_;
};

std::uint8_t flag(bool b)
{
	return b ? 1 : 0;
}

} // namespace

head decode_head(std::span<const std::byte> bytes)
{
	reader r(bytes, "the head of a message");
	head h{};

	if (r.get<std::uint32_t>() != wire_magic)
		throw bad_message("the other end does not speak np_perf's protocol");
	if (const auto version = r.get<std::uint16_t>(); version != wire_version)
		throw bad_message(fmt::format("the other end speaks version {} of the protocol, this one {}: "
					      "run the same np_perf at both ends",
					      version, wire_version));
	h.what = static_cast<kind>(r.get<std::uint16_t>("the kind", static_cast<std::uint16_t>(kind::hello),
							static_cast<std::uint16_t>(kind::bye)));
	h.length = r.get<std::uint32_t>("the length", 0, static_cast<std::uint32_t>(max_body));
	r.end();
	return h;
}

std::vector<std::byte> encode(const test &m)
{
	writer w(kind::hello);

	w.put_all(static_cast<std::uint8_t>(m.op), static_cast<std::uint8_t>(m.over),
		  static_cast<std::uint8_t>(m.how), flag(m.latency), flag(m.completion), flag(m.verify),
		  flag(m.ordered), flag(m.random), flag(m.minor), m.threads, m.window, m.signal_every,
		  m.inline_bytes, m.unaligned, m.absent, m.local_absent, m.pressure, m.size, m.span, m.run,
		  m.sessions);
	return w.take();
}

test decode_test(std::span<const std::byte> body)
{
	reader r(body, "hello");
	test t;

	t.op = r.get<verb>(verb_names, "the verb");
	t.over = r.get<transport>(transport_names, "the transport");
	t.how = r.get<mode>(mode_names, "the mode");
	t.latency = r.get_flag("latency");
	t.completion = r.get_flag("completion");
	t.verify = r.get_flag("verify");
	t.ordered = r.get_flag("ordered");
	t.random = r.get_flag("random");
	t.minor = r.get_flag("minor");
	t.threads = r.get<std::uint16_t>("threads", 1, max_threads);
	t.window = r.get<std::uint16_t>("the window", 1, max_window);
	t.signal_every = r.get<std::uint16_t>("signal", 1, max_window);
	t.inline_bytes = r.get<std::uint16_t>("inline", 0, max_inline);
	t.unaligned = r.get<std::uint16_t>("unaligned", 0, page_size - 1);
	t.absent = r.get<std::uint8_t>("absent", 0, 100);
	t.local_absent = r.get<std::uint8_t>("local-absent", 0, 100);
	t.pressure = r.get<std::uint8_t>("pressure", 0, at_target | at_client);
	t.size = r.get<std::uint64_t>("the size", 1, max_size);
	t.span = r.get<std::uint64_t>("span", 0, max_span);
	t.run = r.get<std::uint64_t>();
	t.sessions = r.get<std::uint8_t>("sessions", 1, max_sessions);
	r.end();
	if (const std::string why = objection(t); !why.empty())
		throw bad_message("hello: " + why);
	return t;
}

std::vector<std::byte> encode(const endpoint &m)
{
	writer w(kind::endpoint);

	w.put_all(m.address, m.length, m.rkey, m.lid);
	for (const std::uint8_t b : m.gid)
		w.put(b);
	w.put_all(m.mtu, flag(m.ethernet), static_cast<std::uint16_t>(m.qps.size()));
	for (const qp_address &q : m.qps)
		w.put_all(q.qpn, q.psn);
	return w.take();
}

endpoint decode_endpoint(std::span<const std::byte> body, const test &t, bool of_client)
{
	constexpr std::uint32_t most = 0xffffff; /* 24 bits */
	reader r(body, "endpoint");
	endpoint e;

	e.address = r.get<std::uint64_t>();
	e.length = r.get<std::uint64_t>();
	e.rkey = r.get<std::uint32_t>();
	e.lid = r.get<std::uint16_t>();
	for (std::uint8_t &b : e.gid)
		b = r.get<std::uint8_t>();
	e.mtu = r.get<std::uint8_t>("the MTU", 1, 5);
	e.ethernet = r.get_flag("ethernet");
	r.get<std::uint16_t>("the number of queue pairs", t.threads, t.threads);
	for (unsigned i = 0; i < t.threads; i++) {
		const auto qpn = r.get<std::uint32_t>("a queue pair's number", 1, most);

		e.qps.push_back({qpn, r.get<std::uint32_t>("a PSN", 0, most)});
	}
	r.end();
	if (const std::uint64_t need = memory_plan(t, of_client).bytes(); e.length != need)
		throw bad_message(fmt::format("endpoint: {} bytes of memory, not {}", e.length, need));
	if (e.address + e.length < e.address)
		throw bad_message("endpoint: memory beyond the end of all addresses");
	return e;
}

std::vector<std::byte> encode(const pass &m)
{
	writer w(kind::pass);

	w.put_all(m.size, m.number, flag(m.prepare));
	return w.take();
}

pass decode_pass(std::span<const std::byte> body, const test &t)
{
	reader r(body, "pass");
	pass p;

	p.size = r.get<std::uint64_t>("the size", 1, t.size);
	p.number = r.get<std::uint64_t>();
	p.prepare = r.get_flag("prepare");
	r.end();
	return p;
}

std::vector<std::byte> encode(const ready &m)
{
	writer w(kind::ready);

	w.put(m.absent);
	return w.take();
}

ready decode_ready(std::span<const std::byte> body)
{
	reader r(body, "ready");
	const ready m{r.get<std::uint8_t>("absent", 0, 100)};

	r.end();
	return m;
}

std::vector<std::byte> encode(const done &m)
{
	writer w(kind::done);

	w.put(static_cast<std::uint16_t>(m.operations.size()));
	for (const std::uint64_t n : m.operations)
		w.put(n);
	return w.take();
}

done decode_done(std::span<const std::byte> body, const test &t)
{
	/* Who checks memory counts to it. */
	constexpr std::uint64_t most = 1ULL << 40;
	reader r(body, "done");
	done d;

	r.get<std::uint16_t>("the number of threads", t.threads, t.threads);
	for (unsigned i = 0; i < t.threads; i++)
		d.operations.push_back(r.get<std::uint64_t>("operations", 0, most));
	r.end();
	return d;
}

std::vector<std::byte> encode(const result &m)
{
	writer w(kind::result);

	w.put_all(m.mismatches, m.received, m.faults_minor, m.faults_major, m.invalidations, m.holds,
		  m.reclaimed);
	return w.take();
}

result decode_result(std::span<const std::byte> body)
{
	reader r(body, "result");
	result m;

	for (std::uint64_t *const n : {&m.mismatches, &m.received, &m.faults_minor, &m.faults_major,
				       &m.invalidations, &m.holds, &m.reclaimed})
		*n = r.get<std::uint64_t>();
	r.end();
	return m;
}

namespace
{

constexpr std::size_t max_text = 400;

/* For a terminal. */
std::string printable(std::string_view text)
{
	std::string out;

	for (const char c : text.substr(0, max_text))
		out += c >= 0x20 && c < 0x7f ? c : '?';
	return out;
}

} // namespace

std::vector<std::byte> encode(const failure &m)
{
	writer w(kind::failure);

	for (const char c : printable(m.text))
		w.put(static_cast<std::uint8_t>(c));
	return w.take();
}

failure decode_failure(std::span<const std::byte> body)
{
	return {printable({reinterpret_cast<const char *>(body.data()), body.size()})};
}

std::vector<std::byte> encode_bye()
{
	return writer(kind::bye).take();
}

std::string objection(const test &t)
{
	const bool one_sided = t.op == verb::read || t.op == verb::write || t.op == verb::write_imm;

	if (t.over == transport::uc && (t.op == verb::read || t.is_atomic()))
		return fmt::format("UC has no {}: use --transport rc", name_of(verb_names, t.op));
	if (t.over == transport::ud && t.op != verb::send)
		return fmt::format("UD has no {}: use --transport rc, or send", name_of(verb_names, t.op));
	if (t.over == transport::uc && one_sided && t.unpinned())
		return fmt::format(
		    "mode {}: a peer's unpinned memory cannot be reached over UC, as nothing is "
		    "answered: use --mode pinned, or --transport rc",
		    name_of(mode_names, t.how));
	if (t.over == transport::ud && t.size > 4096)
		return "UD has messages of one packet, of 4096 bytes at most: use --size";
	if (t.is_atomic() && t.size != 8)
		return "atomic operations are of 8 bytes: leave --size out";
	if (t.is_atomic() && t.unaligned % 8)
		return "atomic operations need aligned addresses: --unaligned has to be a multiple of 8";
	if (t.latency && t.window != 1)
		return "a latency is of one operation at a time: leave --window out, or use --bw";
	if (t.latency && t.signal_every != 1)
		return "a latency needs each operation signaled: leave --signal out, or use --bw";
	if (!t.latency && t.completion)
		return "--completion is a way to measure latency: use it with --lat";
	if (t.signal_every > t.window)
		return "--signal must not be more than --window: none of the window would ever complete";
	if (t.minor && !t.absent && !t.local_absent)
		return "--minor says how memory is absent: use it with --absent or --local-absent";
	if (t.verify && t.takes_receives() && t.over != transport::rc && !t.latency && t.size < 8)
		return "to tell lost messages from wrong ones takes 8 bytes at least: use --size 8";
	const memory_plan client(t, true), target(t, false);
	if (std::max(client.bytes(), target.bytes()) > max_span)
		return fmt::format(
		    "it needs more than {} GiB of memory: use fewer --threads, a smaller --size or --span",
		    max_span / GiB);
	return {};
}

} // namespace perf
