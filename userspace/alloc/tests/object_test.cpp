/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Objects: copies, what travels, bundles, packages, types, files; and all that a peer or a file may get wrong. */
#include <nprdma/alloc.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <random>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using namespace nprdma::alloc;

constexpr std::size_t mib = 1024 * 1024;

template <class E, class F>
void throws(F &&f, const std::string &part)
{
	try {
		f();
		FAIL() << "nothing was thrown";
	} catch (const E &e) {
		EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
	}
}

void fill(std::span<std::byte> bytes, unsigned int seed)
{
	std::mt19937 random(seed);
	for (std::byte &b : bytes)
		b = static_cast<std::byte>(random());
}

/* What would arrive at a peer. */
std::vector<std::byte> sent(const object &o)
{
	std::vector<std::byte> all;
	for (const object::piece &p : o.pieces())
		all.insert(all.end(), p.bytes.begin(), p.bytes.end());
	return all;
}

class Objects : public testing::Test {
protected:
	host_registrar registrar_;
	arena home_{registrar_, {.capacity = 256 * mib}};

	object make(std::size_t metadata, std::size_t data, unsigned int seed = 1)
	{
		object o(home_, type_id("test"), metadata, data);
		fill(o.metadata(), seed);
		fill(o.data(), seed + 1);
		return o;
	}
	buffer received(std::span<const std::byte> bytes)
	{
		buffer b = home_.acquire(bytes.size());
		std::copy(bytes.begin(), bytes.end(), b.data());
		return b;
	}
	void TearDown() override { EXPECT_EQ(home_.stats().blocks, 0U) << "memory that nobody owns"; }
};

TEST_F(Objects, RefuseHeadersThatCannotBeTrue)
{
	const std::vector<std::byte> good = sent(make(10, 1000));
	const auto with = [&](std::size_t at, std::uint64_t value, std::size_t bytes, const std::string &says) {
		std::vector<std::byte> bad = good;
		std::memcpy(bad.data() + at, &value, bytes);
		throws<bad_object>([&] { (void)object::copy_of(home_, bad); }, says);
		buffer b = received(bad);
		throws<bad_object>([&] { (void)object::accept(std::move(b)); }, says);
		EXPECT_TRUE(b) << "it is the caller's still";
	};
	with(0, 0, 4, "no object begins there");
	with(4, 2, 2, "of version 2");
	with(6, 128, 2, "a header of 128 bytes");
	with(16, 2000, 8, "an object of");
	with(16, UINT64_MAX, 8, "that claims 18446744073709551615 bytes of metadata");
	with(16, UINT64_MAX - 63, 8, "that claims");
	with(24, 1001, 8, "in 1128 bytes");
	with(24, UINT64_MAX - 100, 8, "that claims");
	with(24, std::uint64_t{1} << 60, 8, "in 1128 bytes");
	with(40, 1, 8, "reserved");
	with(63, 1, 1, "reserved");
	throws<bad_object>([&] { (void)object::copy_of(home_, std::span(good).first(63)); }, "63 bytes are less");
	throws<bad_object>([&] { (void)object::copy_of(home_, std::span(good).first(good.size() - 1)); }, "in 1127 bytes");
	throws<bad_size>([&] { (void)object(home_, 1, SIZE_MAX, 1); }, "an object with 18446744073709551615 bytes");
	throws<bad_size>([&] { (void)object(home_, 1, 1, SIZE_MAX); }, "bytes of data");
	EXPECT_TRUE(object::copy_of(home_, good).intact());
}

TEST_F(Objects, DoNotBelieveAHeaderTwice)
{
	object o = object::accept(received(sent(make(8, 100))));
	/* A peer that still may write there. */
	std::memset(o.metadata().data() - sizeof(object_header), 0xff, sizeof(object_header));
	EXPECT_EQ(o.type(), type_id("test"));
	EXPECT_EQ(o.metadata().size(), 8U);
	EXPECT_EQ(o.data().size(), 100U);
	EXPECT_TRUE(o == make(8, 100));
	const object packed = pack(home_, std::array{o});
	EXPECT_TRUE(unpack(packed).at(0) == o);
}

TEST_F(Objects, CopiesAreShallowAndTheLastEndsTheMemory)
{
	object a = make(16, 1000);
	object b = a;
	EXPECT_EQ(a.use_count(), 2);
	EXPECT_TRUE(a.same_as(b));
	EXPECT_EQ(a.data().data(), b.data().data());
	object c = std::move(a);
	EXPECT_FALSE(a);
	EXPECT_EQ(c.use_count(), 2);
	b = object();
	EXPECT_EQ(home_.stats().blocks, 1U);
	c = object();
	EXPECT_EQ(home_.stats().blocks, 0U);
	EXPECT_EQ(c.size(), 0U);
	EXPECT_TRUE(c.pieces().empty());
	EXPECT_TRUE(c == object());
	EXPECT_FALSE(c.clone(home_));
}

TEST_F(Objects, DeepCopiesAreEqualUntilOneChanges)
{
	const object a = make(16, 1000);
	const object b = a.clone(home_);
	EXPECT_FALSE(a.same_as(b));
	EXPECT_TRUE(a == b);
	b.data()[999] ^= std::byte{1};
	EXPECT_FALSE(a == b);
	b.data()[999] ^= std::byte{1};
	b.metadata()[0] ^= std::byte{1};
	EXPECT_FALSE(a == b);
	EXPECT_FALSE(make(16, 1000) == make(16, 999));
	EXPECT_FALSE(make(16, 1000) == object());
	EXPECT_TRUE(make(0, 0) == make(0, 0));
	EXPECT_FALSE(object(home_, 1, 0, 0) == object(home_, 2, 0, 0));
}

TEST_F(Objects, CopiesMayEndInAnyThread)
{
	object o = make(16, 1000);
	{
		std::vector<std::jthread> threads;
		for (int t = 0; t < 4; t++)
			threads.emplace_back([o] {
				for (int i = 0; i < 1000; i++) {
					const object copy = o;
					EXPECT_EQ(copy.data().size(), 1000U);
				}
			});
		o = object();
	}
	EXPECT_EQ(home_.stats().blocks, 0U);
}

TEST_F(Objects, TravelInOneRun)
{
	for (const std::size_t metadata : {0U, 1U, 63U, 64U, 65U})
		for (const std::size_t data : {0U, 1U, 1000U, 100000U}) {
			const object o = make(metadata, data);
			const auto bytes = sent(o);
			ASSERT_EQ(bytes.size(), o.size());
			object_header h;
			std::memcpy(&h, bytes.data(), sizeof(h));
			ASSERT_EQ(object::size_of(h), o.size());
			ASSERT_TRUE(object::copy_of(home_, bytes) == o);
			ASSERT_TRUE(object::accept(received(bytes)) == o);
			ASSERT_EQ(reinterpret_cast<std::uintptr_t>(o.data().data()) % 64, 0U);
		}
	const object o = make(10, 100);
	ASSERT_EQ(o.pieces().size(), 1U);
	EXPECT_EQ(o.pieces()[0].where.address(), reinterpret_cast<std::uintptr_t>(o.pieces()[0].bytes.data()));
}

TEST_F(Objects, DoNotCarryWhatWasInTheMemoryBefore)
{
	for (int i = 0; i < 50; i++) {
		buffer b = home_.acquire(1 << 13);
		std::memset(b.data(), 0xee, b.size());
	}
	const auto old = [](std::span<const std::byte> bytes) { return std::count(bytes.begin(), bytes.end(), std::byte{0xee}); };
	const auto zeros = [&](std::size_t metadata, std::size_t data) {
		object o(home_, 1, metadata, data);
		std::memset(o.metadata().data(), 0, metadata);
		std::memset(o.data().data(), 0, data);
		return o;
	};
	const object o = zeros(3, 7000), other = zeros(1, 99);
	EXPECT_EQ(old(sent(o)), 0);
	EXPECT_EQ(old(sent(pack(home_, std::array{other, other, o}))), 0);
	std::vector<std::byte> mine(100), metadata(3);
	EXPECT_EQ(old(sent(object::around(home_, 1, metadata, mine, {}))), 0);
}

TEST_F(Objects, MayHaveDataInMemoryOfTheCaller)
{
	std::vector<std::byte> mine(5000);
	fill(mine, 9);
	const std::array<std::byte, 3> metadata{std::byte{1}, std::byte{2}, std::byte{3}};
	int cleanups = 0;
	{
		object o = object::around(home_, 77, metadata, mine, [&] { cleanups++; });
		const object again = o;
		ASSERT_EQ(o.pieces().size(), 2U);
		EXPECT_EQ(o.pieces()[1].bytes.data(), mine.data());
		EXPECT_EQ(o.pieces()[1].where.address(), reinterpret_cast<std::uintptr_t>(mine.data()));
		EXPECT_NE(o.pieces()[0].where.lkey, o.pieces()[1].where.lkey);
		EXPECT_EQ(home_.stats().registrations, 2U);
		const object there = object::copy_of(home_, sent(o));
		EXPECT_TRUE(there == o);
		EXPECT_EQ(there.pieces().size(), 1U);
		o = object();
		EXPECT_EQ(cleanups, 0);
	}
	EXPECT_EQ(cleanups, 1);
	EXPECT_EQ(home_.stats().deregistrations, 1U);
}

TEST_F(Objects, NoticeDamageOnceSealed)
{
	object o = make(10, 1000);
	EXPECT_TRUE(o.intact());
	o.data()[3] ^= std::byte{4};
	EXPECT_TRUE(o.intact()) << "not sealed";
	o.seal();
	for (const auto part : {o.metadata(), o.data()})
		for (const std::size_t at : {std::size_t{0}, std::size_t{5}, part.size() - 1}) {
			part[at] ^= std::byte{0x10};
			EXPECT_FALSE(o.intact());
			part[at] ^= std::byte{0x10};
		}
	/* Words that change places. */
	std::swap_ranges(o.data().begin(), o.data().begin() + 8, o.data().begin() + 8);
	EXPECT_FALSE(o.intact());
	std::swap_ranges(o.data().begin(), o.data().begin() + 8, o.data().begin() + 8);
	EXPECT_TRUE(object::copy_of(home_, sent(o)).intact());
	auto bytes = sent(o);
	bytes.back() ^= std::byte{1};
	EXPECT_FALSE(object::copy_of(home_, bytes).intact());
}

TEST_F(Objects, ShowContentAsTypes)
{
	struct shape {
		std::uint32_t rows, columns;
	};
	object o(home_, 1, sizeof(shape), 6 * sizeof(double));
	o.metadata_as<shape>() = {2, 3};
	o.data_as<double>()[5] = 1.5;
	EXPECT_EQ(o.metadata_as<shape>().columns, 3U);
	EXPECT_EQ(o.data_as<double>().size(), 6U);
	throws<bad_object>([&] { (void)o.metadata_as<std::array<char, 9>>(); }, "the metadata of an object: 8 bytes");
	throws<bad_object>([&] { (void)o.data_as<std::array<char, 7>>(); }, "units of 7");
}

TEST_F(Objects, AtOddAddressesAreRefused)
{
	const object good = make(16, 1000);
	const auto bytes = sent(good);
	std::vector<std::byte> mine(bytes.size() + 128);
	const std::size_t aligned = -reinterpret_cast<std::uintptr_t>(mine.data()) % 64;
	for (const std::size_t off : {1U, 3U, 8U, 32U}) {
		std::copy(bytes.begin(), bytes.end(), mine.data() + aligned + off);
		buffer b = home_.adopt(std::span(mine).subspan(aligned + off, bytes.size()), nullptr);
		throws<bad_object>([&] { (void)object::accept(std::move(b)); }, "no multiple of 64");
		EXPECT_TRUE(b) << "it is the caller's still";
		EXPECT_TRUE(object::copy_of(home_, b.bytes()) == good);
	}
	std::copy(bytes.begin(), bytes.end(), mine.data() + aligned);
	EXPECT_TRUE(object::accept(home_.adopt(std::span(mine).subspan(aligned, bytes.size()), nullptr)) == good);

	/* What is in a package of which data are the caller's. */
	const object package = pack(home_, std::array{good});
	std::vector<std::byte> odd(package.data().size() + 128);
	const std::size_t begin = -reinterpret_cast<std::uintptr_t>(odd.data()) % 64;
	const auto around = [&](std::size_t off) {
		const auto data = std::span(odd).subspan(begin + off, package.data().size());
		std::copy(package.data().begin(), package.data().end(), data.begin());
		return object::around(home_, package_type, package.metadata(), data, {});
	};
	throws<bad_object>([&] { (void)unpack(around(8)); }, "no multiple of 64");
	EXPECT_TRUE(unpack(around(0)).at(0) == good);

	/* And arrays. */
	const bundle<std::uint64_t, char> numbers(home_, 1, {10, 5});
	std::vector<std::byte> data(numbers.as_object().data().size() + 16);
	const std::size_t first = -reinterpret_cast<std::uintptr_t>(data.data()) % 8;
	const auto with_data = [&](std::size_t off) {
		return object::around(home_, 1, numbers.as_object().metadata(),
				      std::span(data).subspan(first + off, numbers.as_object().data().size()), {});
	};
	throws<bad_object>([&] { bundle<std::uint64_t, char>{with_data(1)}; }, "do not begin at a multiple of 8");
	const bundle<std::uint64_t, char> there{with_data(8)};
	there.get<0>()[9] = 1;
	EXPECT_EQ(there.get<0>().size(), 10U);
}

TEST_F(Objects, OfSeveralArraysAreBundles)
{
	using particles = bundle<double, std::uint32_t, char>;
	particles b(home_, type_id("particles"), {1000, 7, 0});
	for (double &x : b.get<0>())
		x = 2.5;
	b.get<1>()[6] = 12;
	EXPECT_TRUE(b.get<2>().empty());
	EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.get<1>().data()) % 64, 0U);

	const auto bytes = sent(b.as_object());
	const particles there{object::copy_of(home_, bytes)};
	EXPECT_EQ(there.get<0>().size(), 1000U);
	EXPECT_EQ(there.get<0>()[999], 2.5);
	EXPECT_EQ(there.get<1>()[6], 12U);
	EXPECT_TRUE(there.as_object() == b.as_object());

	throws<bad_object>([&] { bundle<double, std::uint64_t, char>{object::copy_of(home_, bytes)}; },
			   "array 1 of a bundle has elements of 4 bytes, not of 8");
	throws<bad_object>([&] { bundle<double>{b.as_object()}; }, "is no bundle of 1 arrays");
	/* Counts that a peer may have written: metadata are behind the header, a size and a count for each array. */
	for (const std::uint64_t count : {std::uint64_t{1001}, UINT64_MAX, UINT64_MAX / 8 + 1, std::uint64_t{1} << 57}) {
		auto bad = bytes;
		std::memcpy(bad.data() + 64 + 8, &count, sizeof(count));
		if (count == 1001)
			std::memcpy(bad.data() + 64 + 40, &count, sizeof(count));
		throws<bad_object>([&] { particles{object::copy_of(home_, bad)}; }, "claims more than its data");
	}
	throws<bad_size>([&] { particles(home_, 1, {SIZE_MAX / 8, 1, 1}); }, "more than any arena has");
	throws<bad_size>([&] { particles(home_, 1, {std::size_t{1} << 56, std::size_t{1} << 58, 1}); }, "more than any");
}

TEST_F(Objects, ArePackedAndUnpackedWithoutACopy)
{
	std::vector<object> all{make(3, 10), make(0, 0), make(100, 70000, 5), make(64, 64, 6)};
	std::vector<object> parts;
	{
		const object package = pack(home_, all);
		const object there = object::accept(received(sent(package)));
		const std::uint64_t before = home_.stats().allocations;
		parts = unpack(there);
		EXPECT_EQ(home_.stats().allocations, before);
	}
	ASSERT_EQ(parts.size(), all.size());
	for (std::size_t i = 0; i < all.size(); i++) {
		EXPECT_TRUE(parts[i] == all[i]);
		EXPECT_EQ(parts[i].pieces()[0].where.address(),
			  reinterpret_cast<std::uintptr_t>(parts[i].pieces()[0].bytes.data()));
	}
	all.clear();
	/* The package lives in its last part; that of a package in a package, too. */
	parts.erase(parts.begin(), parts.end() - 1);
	EXPECT_EQ(home_.stats().blocks, 1U);
	std::vector<object> inner = unpack(unpack(pack(home_, std::array{pack(home_, parts)}))[0]);
	parts.clear();
	ASSERT_EQ(inner.size(), 1U);
	EXPECT_TRUE(inner[0] == make(64, 64, 6));
	EXPECT_TRUE(unpack(pack(home_, {})).empty());
	throws<bad_object>([&] { (void)pack(home_, std::array{object()}); }, "an empty object in a package");
}

TEST_F(Objects, InPackagesAreChecked)
{
	throws<bad_object>([&] { (void)unpack(make(8, 100)); }, "is no package");
	throws<bad_object>([&] { (void)unpack(object(home_, package_type, 0, 0)); }, "the metadata");
	object package = pack(home_, std::array{make(3, 10), make(3, 10)});
	package.metadata_as<std::uint64_t>() = 3;
	throws<bad_object>([&] { (void)unpack(package); }, "claims 3 objects and has 2");
	package.metadata_as<std::uint64_t>() = 2;
	EXPECT_EQ(unpack(package).size(), 2U);
	const std::uint64_t data = 1 << 20;
	std::memcpy(package.data().data() + 24, &data, sizeof(data));
	throws<bad_object>([&] { (void)unpack(package); }, "an object of");
}

TEST_F(Objects, HaveTypesThatAreRegistered)
{
	static_assert(type_id("") == 0xcbf29ce484222325);
	static_assert(type_id("a") == 0xaf63dc4c8601ec8c); /* of the algorithm's published vectors */
	type_registry types;
	const std::uint64_t matrix = types.add(
		"matrix",
		[](const object &o) {
			if (o.data().size() % 8)
				throw bad_object("no matrix");
		},
		[](const object &o) { return std::to_string(o.data_as<double>().size()) + " elements"; });
	EXPECT_EQ(matrix, type_id("matrix"));
	EXPECT_EQ(types.name_of(matrix), "matrix");
	EXPECT_EQ(types.name_of(1), std::nullopt);
	const object good(home_, matrix, 0, 64), bad(home_, matrix, 0, 63), unknown(home_, 0xabc, 1, 2);
	types.check(good);
	throws<bad_object>([&] { types.check(bad); }, "no matrix");
	throws<bad_object>([&] { types.check(unknown); }, "type 0xabc, which nobody has registered");
	EXPECT_EQ(types.describe(good), "matrix: 0 bytes of metadata, 64 of data; 8 elements");
	EXPECT_EQ(types.describe(unknown), "0xabc: 1 bytes of metadata, 2 of data");
	types.check(pack(home_, std::array{good}));
	EXPECT_EQ(types.describe(pack(home_, std::array{good, bad})),
		  "nprdma.package: 8 bytes of metadata, 256 of data; 2 objects");
	throws<std::invalid_argument>([&] { types.add("matrix"); }, "it is known already");
}

class Files : public Objects {
protected:
	void SetUp() override
	{
		std::string name = (std::filesystem::temp_directory_path() / "alloc_test.XXXXXX").string();
		ASSERT_TRUE(mkdtemp(name.data()));
		directory_ = name;
		path_ = name + "/objects";
	}
	void TearDown() override
	{
		std::filesystem::remove_all(directory_);
		Objects::TearDown();
	}
	std::string directory_, path_;
};

TEST_F(Files, KeepObjects)
{
	std::vector<std::byte> mine(5000);
	fill(mine, 3);
	const std::vector<object> all{make(3, 10), make(0, 0), make(64, 100000, 4),
				      object::around(home_, 5, {}, mine, {})};
	save(path_, all);
	EXPECT_EQ(load(home_, path_), all);
	EXPECT_EQ(std::filesystem::file_size(path_) % 64, 0U);
	EXPECT_FALSE(std::filesystem::exists(path_ + ".part"));
	save(path_, {});
	EXPECT_TRUE(load(home_, path_).empty());
	throws<bad_object>([&] { save(path_, std::array{object()}); }, "an empty object");
	EXPECT_TRUE(load(home_, path_).empty()) << "what was there is there still";
	EXPECT_FALSE(std::filesystem::exists(path_ + ".part"));
}

TEST_F(Files, ThatAreDamagedAreRefused)
{
	save(path_, std::array{make(3, 10), make(5, 5000)});
	const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path_));
	/* Any byte but one of padding: 64 + 3 and 64 + 5 of 128, 10 of 64, 5000 of 5056. */
	for (const std::streamoff at : {0, 5, 20, 30, 33, 50, 64, 66, 128, 137, 192, 256, 260, 320, 5319}) {
		std::fstream f(path_, std::ios::in | std::ios::out | std::ios::binary);
		f.seekg(at);
		const auto old = static_cast<char>(f.get());
		f.seekp(at);
		f.put(static_cast<char>(old ^ 0x41));
		f.close();
		EXPECT_THROW((void)load(home_, path_), bad_object) << "byte " << at;
		f.open(path_, std::ios::in | std::ios::out | std::ios::binary);
		f.seekp(at);
		f.put(old);
	}
	EXPECT_EQ(load(home_, path_).size(), 2U);
	for (const std::streamoff left : {size - 1, size - 64, std::streamoff{200}, std::streamoff{63}}) {
		std::filesystem::resize_file(path_, static_cast<std::uintmax_t>(left));
		throws<bad_object>([&] { (void)load(home_, path_); }, path_ + ", at byte");
	}
	EXPECT_THROW((void)load(home_, directory_ + "/none"), std::system_error);
	/* No open() that waits for a writer. */
	ASSERT_EQ(mkfifo((directory_ + "/fifo").c_str(), 0600), 0);
	throws<bad_object>([&] { (void)load(home_, directory_ + "/fifo"); }, "is no regular file");
	throws<bad_object>([&] { (void)load(home_, directory_); }, "is no regular file");
	EXPECT_THROW(save(directory_ + "/none/objects", {}), std::system_error);
}

TEST_F(Files, WithoutChecksumsAreRefused)
{
	save(path_, std::array{make(3, 1000)});
	std::fstream f(path_, std::ios::in | std::ios::out | std::ios::binary);
	f.seekp(32);
	f.write("\0\0\0\0\0\0\0", 8);
	f.seekp(200);
	f.put('x');
	f.close();
	throws<bad_object>([&] { (void)load(home_, path_); }, path_ + ", at byte 0: the object has no checksum");
}

TEST_F(Files, OfMoreThanTheArenaHasAreRefused)
{
	save(path_, std::array{make(0, 6 * mib)});
	arena small(registrar_, {.name = "small", .capacity = 4 * mib});
	EXPECT_THROW((void)load(small, path_), out_of_memory);
	EXPECT_EQ(small.stats().used, 0U);
}

} // namespace
