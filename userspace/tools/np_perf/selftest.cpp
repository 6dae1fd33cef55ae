// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* What of np_perf needs no device. */
#include "memory.hpp"
#include "messages.hpp"
#include "options.hpp"
#include "report.hpp"
#include "statistics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace
{

using namespace perf;

test some_test()
{
	test t;

	t.op = verb::write;
	t.how = mode::leases;
	t.latency = false;
	t.window = 16;
	t.threads = 3;
	t.size = 4096;
	t.unaligned = 100;
	t.absent = 50;
	t.run = 0x1122334455667788;
	t.sessions = 2;
	return t;
}

endpoint some_endpoint(const test &t, bool of_client)
{
	endpoint e;

	e.address = 0x7f0000001000;
	e.length = memory_plan(t, of_client).bytes();
	e.rkey = 0x80001234;
	e.lid = 2;
	e.gid[15] = 7;
	e.mtu = 5;
	for (unsigned i = 0; i < t.threads; i++)
		e.qps.push_back({100 + i, i});
	return e;
}

std::span<const std::byte> body_of(const std::vector<std::byte> &message)
{
	return std::span(message).subspan(head_bytes);
}

template <class F> std::string what_is_wrong(F &&f)
{
	try {
		f();
	} catch (const bad_message &e) {
		return e.what();
	}
	return "nothing";
}

TEST(NpPerfMessages, AreWhatWasSent)
{
	const test t = some_test();
	const auto hello = encode(t);
	const head h = decode_head(std::span(hello).first(head_bytes));

	EXPECT_EQ(h.what, kind::hello);
	EXPECT_EQ(h.length, hello.size() - head_bytes);
	const test u = decode_test(body_of(hello));
	EXPECT_EQ(u.op, t.op);
	EXPECT_EQ(u.how, t.how);
	EXPECT_EQ(u.latency, t.latency);
	EXPECT_EQ(u.window, t.window);
	EXPECT_EQ(u.threads, t.threads);
	EXPECT_EQ(u.size, t.size);
	EXPECT_EQ(u.unaligned, t.unaligned);
	EXPECT_EQ(u.absent, t.absent);
	EXPECT_EQ(u.run, t.run);
	EXPECT_EQ(u.sessions, t.sessions);

	const endpoint e = decode_endpoint(body_of(encode(some_endpoint(t, false))), t, false);
	EXPECT_EQ(e.rkey, 0x80001234);
	EXPECT_EQ(e.gid[15], 7);
	ASSERT_EQ(e.qps.size(), 3U);
	EXPECT_EQ(e.qps[2].qpn, 102U);
	EXPECT_EQ(decode_done(body_of(encode(done{{1, 2, 1ULL << 40}})), t).operations[2], 1ULL << 40);
	EXPECT_EQ(decode_pass(body_of(encode(pass{64, 5, false})), t).number, 5U);
	EXPECT_EQ(decode_result(body_of(encode(result{.mismatches = 1, .reclaimed = 9}))).reclaimed, 9U);
}

TEST(NpPerfMessages, OfAnyOtherLengthAreRefused)
{
	const test t = some_test();
	const std::vector<std::pair<std::vector<std::byte>, std::function<void(std::span<const std::byte>)>>>
	    all = {
		{encode(t), [](auto b) { (void)decode_test(b); }},
		{encode(some_endpoint(t, true)), [&](auto b) { (void)decode_endpoint(b, t, true); }},
		{encode(pass{64, 5, true}), [&](auto b) { (void)decode_pass(b, t); }},
		{encode(ready{5}), [](auto b) { (void)decode_ready(b); }},
		{encode(done{{1, 2, 3}}), [&](auto b) { (void)decode_done(b, t); }},
		{encode(result{}), [](auto b) { (void)decode_result(b); }},
	    };

	for (const auto &[message, decode] : all) {
		const auto body = body_of(message);

		EXPECT_NO_THROW(decode(body));
		for (std::size_t n = 0; n < body.size(); n++)
			EXPECT_THROW(decode(body.first(n)), bad_message);
		std::vector<std::byte> longer(body.begin(), body.end());
		longer.push_back(std::byte{0});
		EXPECT_THROW(decode(longer), bad_message);
	}
	for (std::size_t n = 0; n < head_bytes; n++)
		EXPECT_THROW((void)decode_head(std::span(all[0].first).first(n)), bad_message);
}

TEST(NpPerfMessages, NameWhatIsWrong)
{
	const test t = some_test();
	auto e = some_endpoint(t, false);
	const auto endpoint_error = [&] {
		return what_is_wrong([&] { (void)decode_endpoint(body_of(encode(e)), t, false); });
	};

	e.length++;
	EXPECT_NE(endpoint_error().find("bytes of memory"), std::string::npos);
	e = some_endpoint(t, false);
	e.address = UINT64_MAX - 4096;
	EXPECT_NE(endpoint_error().find("beyond the end"), std::string::npos);
	e = some_endpoint(t, false);
	e.qps[1].qpn = 1U << 24;
	EXPECT_NE(endpoint_error().find("queue pair"), std::string::npos);
	e = some_endpoint(t, false);
	e.qps[0].psn = 1U << 24;
	EXPECT_NE(endpoint_error().find("PSN"), std::string::npos);
	e = some_endpoint(t, false);
	e.mtu = 6;
	EXPECT_NE(endpoint_error().find("MTU"), std::string::npos);
	e = some_endpoint(t, false);
	e.qps.emplace_back();
	EXPECT_NE(endpoint_error().find("number of queue pairs"), std::string::npos);
	/* A pass larger than what memory was made for. */
	EXPECT_NE(what_is_wrong([&] {
			  (void)decode_pass(body_of(encode(pass{4097, 0, true})), t);
		  }).find("the size"),
		  std::string::npos);
	EXPECT_NE(what_is_wrong([&] {
			  (void)decode_done(body_of(encode(done{{1, 2}})), t);
		  }).find("threads"),
		  std::string::npos);
	EXPECT_NE(what_is_wrong([&] {
			  (void)decode_done(body_of(encode(done{{1, 2, (1ULL << 40) + 1}})), t);
		  }).find("operations"),
		  std::string::npos);
	EXPECT_NE(what_is_wrong([] { (void)decode_ready(body_of(encode(ready{101}))); }).find("absent"),
		  std::string::npos);
}

TEST(NpPerfMessages, AreOfThisVersionOnly)
{
	auto hello = encode(some_test());
	const auto error = [&] {
		return what_is_wrong([&] { (void)decode_head(std::span(hello).first(head_bytes)); });
	};

	hello[5] = std::byte{wire_version + 1};
	EXPECT_NE(error().find("same np_perf at both ends"), std::string::npos);
	hello[0] = std::byte{'G'};
	EXPECT_NE(error().find("does not speak"), std::string::npos);
	hello = encode(some_test());
	hello[8] = std::byte{1}; /* 16 MiB to come */
	EXPECT_NE(error().find("length"), std::string::npos);
	hello = encode(some_test());
	hello[7] = std::byte{static_cast<unsigned char>(kind::bye) + 1};
	EXPECT_NE(error().find("kind"), std::string::npos);
}

/* Whatever is decoded keeps all bounds; all else is refused, and nothing crashes. */
TEST(NpPerfMessages, WithAnyBytesAreRefusedOrWithinBounds)
{
	const auto good = encode(some_test());
	std::mt19937_64 random(1);
	unsigned accepted = 0, refused = 0;

	for (int i = 0; i < 200'000; i++) {
		auto bytes = good;

		for (auto n = random() % 3 + 1; n; n--)
			bytes[head_bytes + random() % (bytes.size() - head_bytes)] =
			    static_cast<std::byte>(random());
		try {
			const test t = decode_test(body_of(bytes));

			accepted++;
			ASSERT_TRUE(objection(t).empty());
			ASSERT_LE(t.size, max_size);
			for (const std::uint64_t size : {std::uint64_t{1}, t.size / 2 + 1, t.size}) {
				const layout l(t, size);

				ASSERT_LE((l.slots - 1) * l.stride + size + t.unaligned, l.target_bytes);
				ASSERT_LE((l.local_slots - 1) * l.stride + size + t.unaligned,
					  l.source_bytes);
				ASSERT_LE((l.receives - 1) * l.receive_stride + size + t.unaligned,
					  l.target_bytes);
			}
			ASSERT_LE(memory_plan(t, true).bytes(), max_span);
			ASSERT_LE(memory_plan(t, false).bytes(), max_span);
		} catch (const bad_message &) {
			refused++;
		}
	}
	EXPECT_GT(accepted, 1000U);
	EXPECT_GT(refused, 1000U);
}

TEST(NpPerfMessages, OfFailureArePrintable)
{
	const auto raw = encode(failure{std::string("a\x1b[31m\n\0b", 9) + std::string(100'000, 'x')});
	const failure f = decode_failure(body_of(raw));

	EXPECT_LT(f.text.size(), 500U);
	EXPECT_TRUE(f.text.starts_with("a?[31m??b"));
	const std::array<std::byte, 3> hostile = {std::byte{0x1b}, std::byte{0xff}, std::byte{'z'}};
	EXPECT_EQ(decode_failure(hostile).text, "??z");
}

TEST(NpPerfLayout, VisitsEachSlotOnceInEachRound)
{
	for (const bool random : {false, true})
		for (const std::uint64_t span : {64U, 4096U, 6400U, 1U << 20, 999'999U}) {
			test t = some_test();

			t.random = random;
			t.span = span;
			t.size = 64;
			const layout l(t, 64);
			std::set<std::uint64_t> seen;
			for (std::uint64_t i = 0; i < l.slots; i++)
				seen.insert(l.slot(5 * l.slots + i));
			EXPECT_EQ(seen.size(), l.slots);
			EXPECT_EQ(l.slots, span / 64);
			if (random && l.slots > 8) {
				EXPECT_GT(std::max(l.slot(1), l.slot(2)) - std::min(l.slot(1), l.slot(2)),
					  1U);
			}
		}
}

TEST(NpPerfLayout, GivesThreadsMemoryOfTheirOwn)
{
	const test t = some_test();
	const memory_plan p(t, false);

	EXPECT_EQ(p.source_bytes, 0U);
	EXPECT_EQ(p.target(2) + p.target_bytes, p.bytes());
	test both = t;
	both.latency = true;
	both.window = 1;
	const memory_plan q(both, true);
	EXPECT_EQ(q.source(0), q.target(2) + q.target_bytes);
	EXPECT_EQ(q.source(2) + q.source_bytes, q.bytes());
}

TEST(NpPerfPattern, TellsDataFromAllOther)
{
	std::vector<std::byte> data(1001);
	const pattern right(1, 2, 3);

	right.fill(data);
	EXPECT_TRUE(right.matches(data));
	EXPECT_TRUE(right.matches(std::span(data).first(13)));
	EXPECT_FALSE(pattern(2, 2, 3).matches(data));
	EXPECT_FALSE(pattern(1, 3, 3).matches(data));
	EXPECT_FALSE(pattern(1, 2, 4).matches(data));
	for (std::size_t i = 0; i < data.size(); i++) {
		data[i] ^= std::byte{0x10};
		EXPECT_FALSE(right.matches(data));
		data[i] ^= std::byte{0x10};
	}
}

TEST(NpPerfMemory, IsAbsentWhenItWasTakenAway)
{
	const memory m(1 << 20, true, true);
	std::vector<std::byte> before(m.all().begin(), m.all().end());

	EXPECT_EQ(m.absent(), 0U);
	m.make_absent(100, 1);
	EXPECT_EQ(m.absent(), 100U);
	m.make_resident();
	EXPECT_EQ(m.absent(), 0U);
	m.make_absent(30, 1);
	/* 256 pages by chance */
	EXPECT_NEAR(m.absent(), 30, 12);
	EXPECT_TRUE(std::equal(before.begin(), before.end(), m.all().begin()));
}

TEST(NpPerfStatistics, OfLatenciesAreThoseOfASlowerWay)
{
	std::mt19937_64 random(7);

	for (const std::size_t n : {1U, 2U, 3U, 99U, 100U, 1000U, 12'345U}) {
		std::vector<std::uint64_t> ns(n);
		for (auto &x : ns)
			x = random() % 1'000'000;
		auto sorted = ns;
		std::sort(sorted.begin(), sorted.end());
		const double sum = std::accumulate(ns.begin(), ns.end(), 0.0);
		const latency_summary s = summarize(ns);

		EXPECT_EQ(s.count, n);
		EXPECT_DOUBLE_EQ(s.min * 1e3, static_cast<double>(sorted.front()));
		EXPECT_DOUBLE_EQ(s.max * 1e3, static_cast<double>(sorted.back()));
		EXPECT_NEAR(s.average * 1e3, sum / static_cast<double>(n), 1e-3);
		/* No more than one in a hundred is above. */
		const auto above = [&](double us) {
			return static_cast<std::size_t>(
			    std::count_if(sorted.begin(), sorted.end(), [&](std::uint64_t x) {
				    return static_cast<double>(x) > us * 1e3 + 0.5;
			    }));
		};
		EXPECT_LE(above(s.p99), n / 100);
		EXPECT_LE(above(s.p999), n / 1000);
		EXPECT_LE(above(s.typical), n / 2);
	}
	std::vector<std::uint64_t> two = {1000, 3000};
	const latency_summary s = summarize(two);
	EXPECT_DOUBLE_EQ(s.typical, 2);
	EXPECT_DOUBLE_EQ(s.deviation, 1);
	std::vector<std::uint64_t> none;
	EXPECT_EQ(summarize(none).count, 0U);
}

TEST(NpPerfStatistics, MedianOfAnyOrder)
{
	EXPECT_DOUBLE_EQ(median({}), 0);
	EXPECT_DOUBLE_EQ(median({3}), 3);
	EXPECT_DOUBLE_EQ(median({9, 1, 5}), 5);
	EXPECT_DOUBLE_EQ(median({9, 1, 5, 7}), 6);
}

TEST(NpPerfStatistics, HistogramHasABucketForEveryTime)
{
	std::mt19937_64 random(3);
	histogram h;

	for (int i = 0; i < 100'000; i++) {
		const std::uint64_t ns = random() >> random() % 64;
		const std::size_t n = histogram::bucket(ns);

		ASSERT_LT(n, histogram::size);
		ASSERT_GE(ns, histogram::floor(n));
		if (n + 1 < histogram::size) {
			ASSERT_LT(ns, histogram::floor(n + 1));
		}
		/* at most an eighth wide */
		if (ns >= histogram::cuts && n + 1 < histogram::size) {
			ASSERT_LE((histogram::floor(n + 1) - histogram::floor(n)) * histogram::cuts,
				  histogram::floor(n));
		}
		h.add(ns);
	}
	EXPECT_EQ(h.total(), 100'000U);
	EXPECT_EQ(histogram::bucket(0), 0U);
	EXPECT_EQ(histogram::bucket(UINT64_MAX), histogram::size - 1);
	histogram twice = h;
	twice.add(h);
	EXPECT_EQ(twice.total(), 200'000U);
}

TEST(NpPerfStatistics, BandwidthIsOfAllThreadsTogether)
{
	std::vector<std::vector<progress>> marks(2);

	/* The second thread does all of its work in the first half. */
	for (std::uint64_t i = 1; i <= 1000; i++) {
		marks[0].push_back({5000 + i * 1'000'000, i});
		marks[1].push_back({5000 + i * 500'000, i});
	}
	const bandwidth_summary s = summarize(marks, 5000);
	EXPECT_EQ(s.count, 2000U);
	EXPECT_NEAR(s.seconds, 1, 1e-9);
	EXPECT_NEAR(s.average, 2000, 1e-3);
	EXPECT_NEAR(s.peak, 3000, 50);

	/* Too few to tell a peak from several completions seen at once. */
	const bandwidth_summary few = summarize({{{1000, 1}, {1'000'000, 64}}}, 0);
	EXPECT_DOUBLE_EQ(few.peak, few.average);
	EXPECT_EQ(summarize({{}, {}}, 5).count, 0U);
}

options parsed(std::vector<const char *> arguments)
{
	arguments.insert(arguments.begin(), "np_perf");
	return parse(static_cast<int>(arguments.size()), arguments.data());
}

std::string refused(std::vector<const char *> arguments)
{
	try {
		(void)parsed(std::move(arguments));
	} catch (const usage_error &e) {
		EXPECT_EQ(e.status, 64);
		EXPECT_TRUE(std::string_view(e.what()).starts_with("np_perf: ")) << e.what();
		return e.what();
	}
	return "accepted";
}

TEST(NpPerfOptions, HaveDefaultsOfPerftest)
{
	const options lat = parsed({"read"}), bw = parsed({"write", "--bw"});

	EXPECT_TRUE(lat.what.latency);
	EXPECT_EQ(lat.iterations, 1000U);
	EXPECT_EQ(lat.sizes, std::vector<std::uint64_t>{2});
	EXPECT_EQ(lat.what.window, 1);
	EXPECT_EQ(lat.modes, (std::vector<mode>{mode::pinned, mode::leases}));
	EXPECT_EQ(lat.device.name, "mlx5_1");
	EXPECT_EQ(lat.target_device.name, "mlx5_0");
	EXPECT_FALSE(bw.what.latency);
	EXPECT_EQ(bw.iterations, 5000U);
	EXPECT_EQ(bw.sizes, std::vector<std::uint64_t>{65536});
	EXPECT_EQ(bw.what.window, 128);
	EXPECT_EQ(parsed({"fetch_add", "--bw"}).sizes, std::vector<std::uint64_t>{8});
	EXPECT_EQ(parsed({"read", "-D", "0.5"}).iterations, 0U);
	EXPECT_EQ(parsed({"read", "-a"}).sizes.size(), 23U);
	EXPECT_EQ(parsed({"read", "-a"}).what.size, 8 * MiB);
	EXPECT_LE(parsed({"send", "-c", "ud", "-a"}).what.size, 4096U);
}

TEST(NpPerfOptions, SayWhatIsToBeDone)
{
	const options o =
	    parsed({"write", "-m", "leases,pinned", "somewhere", "--bw", "-s", "4K,1M", "--absent", "30",
		    "--pressure", "both", "-t", "4", "-w", "32", "--unaligned", "7", "-p", "1000"});

	EXPECT_EQ(o.modes, (std::vector<mode>{mode::leases, mode::pinned}));
	EXPECT_EQ(o.host, "somewhere");
	EXPECT_EQ(o.device.name, "");
	EXPECT_EQ(o.sizes, (std::vector<std::uint64_t>{4096, 1 << 20}));
	EXPECT_EQ(o.what.absent, 30);
	EXPECT_EQ(o.what.pressure, at_target | at_client);
	EXPECT_EQ(o.what.threads, 4);
	EXPECT_EQ(o.what.window, 32);
	EXPECT_EQ(o.what.unaligned, 7);
	EXPECT_EQ(o.port, 1000);
	EXPECT_EQ(o.warm, 0);
	EXPECT_TRUE(parsed({"write", "--verify"}).what.ordered);
	EXPECT_TRUE(parsed({"--listen", "5000"}).listens);
	EXPECT_EQ(parsed({"write", "-c", "uc"}).modes, std::vector<mode>{mode::pinned});
}

TEST(NpPerfOptions, AreRefusedWithTheReason)
{
	const std::vector<std::pair<std::vector<const char *>, const char *>> all = {
	    {{}, "VERB is missing"},
	    {{"fly"}, "fly"},
	    {{"read", "-c", "uc"}, "UC has no read"},
	    {{"write", "-c", "ud"}, "UD has no write"},
	    {{"write", "-c", "uc", "-m", "leases"}, "cannot be reached over UC"},
	    {{"send", "-c", "ud", "-s", "8192"}, "one packet"},
	    {{"fetch_add", "-s", "16"}, "8 bytes"},
	    {{"fetch_add", "--unaligned", "4"}, "multiple of 8"},
	    {{"read", "--lat", "--bw"}, "choose one"},
	    {{"read", "-w", "8"}, "one operation at a time"},
	    {{"read", "--bw", "-w", "8", "--signal", "9"}, "--signal"},
	    {{"read", "--bw", "--histogram"}, "latencies"},
	    {{"read", "--bw", "--completion"}, "--completion"},
	    {{"read", "-s", "0"}, "--size 0"},
	    {{"read", "-s", "2G"}, "--size"},
	    {{"read", "-s", "x"}, "x"},
	    {{"read", "-s", "99999999999999999999"}, "size"},
	    {{"read", "-n", "0"}, "iters"},
	    {{"read", "-n", "-1"}, "iters"},
	    {{"read", "-n", "1", "-D", "1"}, "xcludes"},
	    {{"read", "-t", "0"}, "threads"},
	    {{"read", "-t", "65"}, "threads"},
	    {{"read", "-t", "5000000000"}, "threads"},
	    {{"read", "--absent", "101"}, "absent"},
	    {{"read", "--absent", "5", "--resident"}, "xcludes"},
	    {{"read", "--absent", "5", "--warm", "1"}, "xcludes"},
	    {{"read", "--minor"}, "--minor"},
	    {{"read", "-m", "pinned,pinned"}, "twice"},
	    {{"read", "-m", "pinned,loose"}, "loose"},
	    {{"read", "--listen", "5000"}, "no VERB"},
	    {{"--listen", "65536"}, "listen"},
	    {{"read", "host", "--target-device", "x"}, "--target-device"},
	    {{"read", "--bw", "-t", "64", "--span", "60G"}, "memory"},
	    {{"read", "--frobnicate"}, "frobnicate"},
	};

	for (const auto &[arguments, reason] : all)
		EXPECT_NE(refused(arguments).find(reason), std::string::npos)
		    << reason << ": " << refused(arguments);
}

TEST(NpPerfOptions, HelpIsNoError)
{
	for (const char *const flag : {"--help", "--version"})
		try {
			(void)parsed({flag});
			FAIL();
		} catch (const usage_error &e) {
			EXPECT_EQ(e.status, 0);
			EXPECT_NE(std::string(e.what()).find("np_perf"), std::string::npos);
		}
}

series with_typical(mode m, std::vector<double> us)
{
	series s{4096, m, {}};

	for (const double x : us) {
		outcome o{};

		o.latency.typical = x;
		o.operations = 10;
		o.latencies.add(static_cast<std::uint64_t>(x * 1e3));
		s.rounds.push_back(o);
	}
	return s;
}

TEST(NpPerfReport, RatiosAreOfTheSameRound)
{
	const series first = with_typical(mode::pinned, {1, 100, 10});
	const series other = with_typical(mode::leases, {2, 200, 15});

	const ratios r(parsed({"read"}).what, other, first);
	EXPECT_DOUBLE_EQ(r.median, 2);
	EXPECT_DOUBLE_EQ(r.least, 1.5);
	EXPECT_DOUBLE_EQ(r.most, 2);
	EXPECT_DOUBLE_EQ(ratios(parsed({"read"}).what, other, with_typical(mode::pinned, {0, 0, 0})).median,
			 0);
}

TEST(NpPerfReport, HasPerftestsColumnsAndValidJson)
{
	const options o = parsed({"read", "--json", "x\"y", "-d", "a\"\\b\n", "--verify"});
	const turn t = {with_typical(mode::pinned, {1, 2, 3}), with_typical(mode::leases, {2, 4, 6})};
	const std::string text = table(o, t), j = json(o, {t, t});

	EXPECT_NE(table_head(o).find("t_typical[usec]"), std::string::npos);
	EXPECT_NE(text.find("leases      2.000  (2.000 to 2.000)"), std::string::npos) << text;
	EXPECT_NE(text.find("# leases: 0 mismatches"), std::string::npos) << text;
	EXPECT_NE(bars(t).find("***"), std::string::npos);
	EXPECT_NE(j.find("\"device\": \"a\\\"\\\\b\\u000a\""), std::string::npos) << j;

	/* Braces and commas are where they have to be: enough of JSON for what is written. */
	std::vector<char> open;
	bool in_string = false;
	char before = 0;
	for (std::size_t i = 0; i < j.size(); i++) {
		const char c = j[i];

		if (in_string) {
			if (c == '\\')
				i++;
			else if (c == '"')
				in_string = false;
			ASSERT_GE(static_cast<unsigned char>(c), 0x20);
			before = 's';
			continue;
		}
		if (c == '"')
			in_string = true;
		if (c == '{' || c == '[')
			open.push_back(c == '{' ? '}' : ']');
		if (c == '}' || c == ']') {
			ASSERT_NE(before, ',');
			ASSERT_FALSE(open.empty());
			ASSERT_EQ(open.back(), c);
			open.pop_back();
		}
		if (c == ',') {
			ASSERT_TRUE(before != ',' && before != '{' && before != '[');
		}
		if (!std::isspace(static_cast<unsigned char>(c)))
			before = c;
	}
	EXPECT_TRUE(open.empty());
}

} // namespace
