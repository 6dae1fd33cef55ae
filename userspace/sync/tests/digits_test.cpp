// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* The digits: data, gradients, and that small groups learn them as all together do. */
#include "crew.hpp"

#include "training.hpp"

#include <algorithm>
#include <cmath>
#include <zlib.h>

using namespace crew;

namespace
{

TEST(Digits, DataIsThatOfTheUciSet)
{
	const auto set = digits::load<float>();
	EXPECT_EQ(set.training.count(), 1438U);
	EXPECT_EQ(set.test.count(), 359U);
	std::size_t of_digit[10] = {};
	for (const auto d : set.training.digit)
		++of_digit[d];
	for (const auto d : set.test.digit)
		++of_digit[d];
	/* As its description says. */
	const std::size_t described[] = {178, 182, 177, 183, 181, 182, 181, 179, 174, 180};
	for (int d = 0; d < 10; ++d)
		EXPECT_EQ(of_digit[d], described[d]) << d;
	EXPECT_EQ(*std::max_element(set.training.pixel.begin(), set.training.pixel.end()), 1);
}

class DamagedData : public testing::Test
{
protected:
	std::string error_of(const std::string &text)
	{
		const gzFile file = gzopen(path_.c_str(), "wb");
		gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
		gzclose(file);
		try {
			(void)digits::load<float>(path_);
		} catch (const std::runtime_error &e) {
			return e.what();
		}
		return "";
	}
	~DamagedData() override { ::unlink(path_.c_str()); }
	const std::string path_ = testing::TempDir() + "digits-" + std::to_string(::getpid()) + ".csv.gz";
};

TEST_F(DamagedData, IsRefusedWithTheLine)
{
	std::string row;
	for (int i = 0; i < 64; ++i)
		row += "1,";
	for (const std::string &bad :
	     {std::string("x"), std::string(""), row, row + "10", row + "1,1", row.substr(2) + "1",
	      "17," + row.substr(2) + "1", "nan," + row.substr(2) + "1", "-1," + row.substr(2) + "1"})
		EXPECT_NE(error_of(row + "3\n" + bad + "\n").find("line 2"), std::string::npos) << bad;
	EXPECT_NE(error_of(row + "3\n").find("too few images"), std::string::npos);
	EXPECT_THROW((void)digits::load<float>("/nowhere"), std::runtime_error);
}

TEST(Models, GradientIsThatOfTheLoss)
{
	const auto set = digits::load<double>();
	const std::vector<std::size_t> batch = {5, 17, 300, 301, 900, 1400};
	for (const char *name : {"logistic", "network"}) {
		const auto m = digits::make_model<double>(name);
		std::vector<double> x(m->parameters()), gradient(m->moved()), other(m->moved());
		m->initialise(x, 3);
		/* Away from where all is alike. */
		for (std::size_t i = 0; i < m->moved(); ++i)
			x[i] += 0.1 * std::sin(static_cast<double>(i));
		m->learn(x, set.training, batch, gradient);
		unsigned compared = 0;
		for (std::size_t i = 0; i < m->moved(); i += 7) {
			const double step = 1e-5, was = x[i];
			x[i] = was + step;
			const double up = m->learn(x, set.training, batch, other);
			x[i] = was - step;
			const double down = m->learn(x, set.training, batch, other);
			x[i] = was;
			EXPECT_NEAR((up - down) / (2 * step), gradient[i], 1e-6)
			    << name << ", parameter " << i;
			compared += std::abs(gradient[i]) > 1e-4;
		}
		EXPECT_GT(compared, 30U) << name;
	}
}

struct result {
	double accuracy = 0; /* of the mean of all */
	double own = 0;      /* the mean of the workers' */
};

result learn(std::uint32_t workers, const std::string &schedule_name, digits::plan p, settings how = {})
{
	static const auto set = digits::load<float>();
	std::vector<digits::outcome<float>> all(workers);
	run<float>(schedule::parse(schedule_name, workers), digits::parameters_of(p.model), patient(how),
		   [&](worker<float> &w) { all[w.rank] = digits::train(*w.sync, w.rank, workers, set, p); });
	result r;
	for (const auto &o : all) {
		EXPECT_EQ(o.trouble, "");
		if (o.epochs.empty())
			return r;
		r.accuracy += o.last.accuracy / workers;
		r.own += o.epochs.back().accuracy / workers;
	}
	return r;
}

constexpr double half_a_percent = 0.005;

/*
 * The parameters of an all-reduce are those of one worker that sees all batches: the bar for all else. One
 * image is more than a quarter of a percent, so where it matters from which random numbers a model begins, it
 * is the mean of
 * @beginnings that counts.
 */
void expect_groups_learn_as_all(const char *model, std::uint64_t beginnings)
{
	for (const std::uint32_t n : {4U, 9U, 16U}) {
		double groups = 0, all = 0;
		for (std::uint64_t seed = 1; seed <= beginnings; ++seed) {
			digits::plan p{.model = model, .epochs = 25, .seed = seed};
			groups += learn(n, "grid", p).accuracy / static_cast<double>(beginnings);
			p.how = digits::exchange::halving_doubling;
			all += learn(n, "full", p).accuracy / static_cast<double>(beginnings);
		}
		EXPECT_GE(groups, all - half_a_percent) << n << " workers";
		EXPECT_GT(all, 0.9) << n << " workers";
	}
}

TEST(Learning, GroupsAreWithinHalfAPercentOfAllReduce)
{
	expect_groups_learn_as_all("logistic", 1);
}

TEST(Learning, GroupsAreWithinHalfAPercentOfAllReduceWithAHiddenLayer)
{
	expect_groups_learn_as_all("network", 3);
}

TEST(Learning, AloneIsWorse)
{
	const result groups = learn(16, "grid", {.model = "network", .epochs = 25});
	const result alone = learn(16, "local", {.model = "network", .epochs = 25});
	EXPECT_LT(alone.own, groups.own - 0.02);
}

TEST(Learning, FewerBitsPartsAndOverlapLearnAsWell)
{
	const digits::plan p{.model = "network", .epochs = 25};
	const double exact = learn(4, "grid", p).accuracy;
	EXPECT_GE(learn(4, "grid", p, {.format = wire::int16}).accuracy, exact - half_a_percent);
	EXPECT_GE(learn(4, "grid", p, {.format = wire::int8}).accuracy, exact - 2 * half_a_percent);
	EXPECT_GE(learn(4, "grid", p, {.parts = 4}).accuracy, exact - 2 * half_a_percent);
	digits::plan overlapped = p;
	overlapped.overlapped = true;
	EXPECT_GE(learn(4, "grid", overlapped).accuracy, exact - 2 * half_a_percent);
}

TEST(Learning, TooFewImagesAreSaidSo)
{
	run<float>(schedule::local(2), digits::parameters_of("logistic"), patient(), [](worker<float> &w) {
		static const auto set = digits::load<float>();
		EXPECT_NE(digits::train(*w.sync, w.rank, 2, set, {.batch = 10000}).trouble, "");
	});
}

} // namespace
