/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "policy.hpp"

#include <gtest/gtest.h>

namespace npr::preload {
namespace {

using unpin = settings::unpin;

TEST(Policy, SaysWhichRegionsAreUnpinned)
{
	const std::tuple<const char *, unpin, std::size_t> good[] = {
		{"all", unpin::all, 0},		{"none", unpin::none, 0},	 {"odp", unpin::odp, 0},
		{"remote", unpin::remote, 0},	{"4096", unpin::all, 4096},	 {"0x1000", unpin::all, 4096},
		{"remote,65536", unpin::remote, 65536}, {"65536, odp", unpin::odp, 65536}, {"0", unpin::all, 0},
	};

	for (const auto &[value, which, least] : good) {
		settings s;
		s.which = unpin::none;
		s.at_least = 7;
		EXPECT_EQ(assign(s, "unpinned", value), std::nullopt) << value;
		EXPECT_EQ(s.which, which) << value;
		EXPECT_EQ(s.at_least, least) << value;
		EXPECT_EQ(s.partial(), which != unpin::all || least);
	}
}

TEST(Policy, RefusesWhatItDoesNotKnowAndChangesNothing)
{
	const std::pair<const char *, const char *> bad[] = {
		{"unpinned", ""},	  {"unpinned", "some"},	   {"unpinned", "-1"},	       {"unpinned", "1,2"},
		{"unpinned", "all,odp"},  {"unpinned", "all,"},	   {"unpinned", "4k"},	       {"unpinned", "0x"},
		{"unpinned", "99999999999999999999"},		   {"ordered", "yes"},	       {"ordered", ""},
		{"leases", "2"},	  {"direct_verbs", "1"},   {"pinned", "all"},	       {"", "1"},
	};

	for (const auto &[name, value] : bad) {
		settings s;
		const auto error = assign(s, name, value);
		ASSERT_TRUE(error) << name << '=' << value;
		EXPECT_FALSE(error->empty());
		EXPECT_EQ(s.which, unpin::all);
		EXPECT_EQ(s.at_least, 0U);
		EXPECT_TRUE(s.leases && !s.ordered);
	}
}

TEST(Policy, FileHasALineForEachSetting)
{
	settings s;

	EXPECT_EQ(assign_lines(s, "# this host\n\n  unpinned = remote, 4096 # large ones\nordered=1\nleases = 0\n"
				  "direct_verbs=hidden\nreport=/var/log/x y"),
		  std::nullopt);
	EXPECT_EQ(s.which, unpin::remote);
	EXPECT_EQ(s.at_least, 4096U);
	EXPECT_TRUE(s.ordered);
	EXPECT_FALSE(s.leases);
	EXPECT_EQ(s.direct_verbs, settings::direct::hidden);
	EXPECT_TRUE(s.report);
	EXPECT_EQ(s.report_file, "/var/log/x y");

	for (const char *bad : {"unpinned", "\n\nunpinned=some", "ordered=1\nfoo=bar\n", "=1"}) {
		const auto error = assign_lines(s, bad);
		ASSERT_TRUE(error) << bad;
		EXPECT_TRUE(error->starts_with("line ")) << *error;
	}
	EXPECT_TRUE(assign_lines(s, "\n\nunpinned=some")->starts_with("line 3: unpinned is "));
}

TEST(Policy, ReportGoesWhereItIsToGo)
{
	settings s;

	EXPECT_EQ(assign(s, "report", "1"), std::nullopt);
	EXPECT_TRUE(s.report && s.report_file.empty());
	EXPECT_EQ(assign(s, "report", "/tmp/r"), std::nullopt);
	EXPECT_EQ(s.report_file, "/tmp/r");
	EXPECT_EQ(assign(s, "report", "0"), std::nullopt);
	EXPECT_FALSE(s.report);
	EXPECT_TRUE(s.report_file.empty());
}

} // namespace
} // namespace npr::preload
