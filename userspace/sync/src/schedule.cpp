// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "nprdma/sync/schedule.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

namespace nprdma::sync
{
namespace
{

[[noreturn]] void bad(const std::string &what)
{
	throw std::invalid_argument("schedule: " + what);
}

void check_workers(std::uint64_t workers)
{
	if (!workers || workers > max_workers)
		bad(std::to_string(workers) + " workers; 1 to " + std::to_string(max_workers) +
		    " are possible");
}

/* A fraction in lowest terms, never negative. What does not fit throws. */
class fraction
{
public:
	fraction() = default;
	fraction(std::uint64_t n, std::uint64_t d) noexcept : n_(n / std::gcd(n, d)), d_(d / std::gcd(n, d))
	{
	}

	fraction operator*(fraction b) const
	{
		/* Crosswise first, so that the products are as small as they can be. */
		const fraction x(n_, b.d_), y(b.n_, d_);
		return {times(x.n_, y.n_), times(x.d_, y.d_)};
	}
	fraction operator+(fraction b) const
	{
		const std::uint64_t common = std::gcd(d_, b.d_);
		const std::uint64_t l = times(n_, b.d_ / common), r = times(b.n_, d_ / common);
		if (l > std::numeric_limits<std::uint64_t>::max() - r)
			overflow();
		return {l + r, times(d_, b.d_ / common)};
	}
	bool operator==(const fraction &) const = default;

private:
	[[noreturn]] static void overflow()
	{
		throw std::overflow_error(
		    "schedule: fractions of 64 bits are not enough to prove what it mixes");
	}
	static std::uint64_t times(std::uint64_t a, std::uint64_t b)
	{
		std::uint64_t product;
		if (__builtin_mul_overflow(a, b, &product))
			overflow();
		return product;
	}

	std::uint64_t n_ = 0, d_ = 1;
};

/* splitmix64: the standard library's distributions and shuffles differ from one implementation to the next.
 */
class random_numbers
{
public:
	explicit random_numbers(std::uint64_t seed) noexcept : state_(seed) {}
	std::uint64_t next() noexcept
	{
		std::uint64_t z = (state_ += 0x9e3779b97f4a7c15);
		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
		z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
		return z ^ (z >> 31);
	}
	/* 0 to @bound less one, all as likely. */
	std::uint32_t below(std::uint32_t bound) noexcept
	{
		const std::uint64_t limit = std::numeric_limits<std::uint64_t>::max() / bound * bound;
		std::uint64_t x;
		do
			x = next();
		while (x >= limit);
		return static_cast<std::uint32_t>(x % bound);
	}

private:
	std::uint64_t state_;
};

grouping one_group(std::uint32_t workers)
{
	group all;
	all.members.resize(workers);
	std::iota(all.members.begin(), all.members.end(), 0U);
	return {{std::move(all)}};
}

grouping alone(std::uint32_t workers)
{
	grouping r;
	for (rank_t i = 0; i < workers; ++i)
		r.groups.push_back({{i}, {}});
	return r;
}

/* Sizes of @parts parts of @whole, as equal as can be, the larger ones first. */
std::vector<std::uint32_t> equal_parts(std::uint32_t whole, std::uint32_t parts)
{
	std::vector<std::uint32_t> sizes(parts, whole / parts);
	for (std::uint32_t i = 0; i < whole % parts; ++i)
		++sizes[i];
	return sizes;
}

std::uint32_t random_groups(std::uint32_t workers, std::uint32_t size) noexcept
{
	return std::max((workers + size / 2) / size, 1U);
}

grouping random_round(std::uint32_t workers, std::uint32_t size, std::uint64_t seed, std::uint64_t number)
{
	random_numbers draw(seed);
	/* The numbers of neighbouring rounds are alike; what they are mixed to is not. */
	random_numbers numbers(draw.next() ^ number);
	std::vector<rank_t> order(workers);
	std::iota(order.begin(), order.end(), 0U);
	for (std::uint32_t i = workers; i > 1; --i)
		std::swap(order[i - 1], order[numbers.below(i)]);

	grouping r;
	std::size_t at = 0;
	for (const std::uint32_t n : equal_parts(workers, random_groups(workers, size))) {
		group g;
		g.members.assign(order.begin() + static_cast<std::ptrdiff_t>(at),
				 order.begin() + static_cast<std::ptrdiff_t>(at + n));
		std::sort(g.members.begin(), g.members.end());
		r.groups.push_back(std::move(g));
		at += n;
	}
	return r;
}

/* Sorts the members, with their weights. Each of the workers has to be in one group. */
void check(grouping &r, std::uint32_t workers)
{
	std::vector<bool> seen(workers);
	std::uint32_t count = 0;
	for (group &g : r.groups) {
		if (g.members.empty())
			bad("a group has no members");
		if (!g.weights.empty() && g.weights.size() != g.members.size())
			bad("a group has " + std::to_string(g.members.size()) + " members and " +
			    std::to_string(g.weights.size()) + " weights; give each one a weight, or none");
		std::vector<std::pair<rank_t, std::uint32_t>> sorted;
		for (std::size_t i = 0; i < g.members.size(); ++i) {
			const rank_t m = g.members[i];
			if (m >= workers)
				bad("worker " + std::to_string(m) + " is in a group, and there are " +
				    std::to_string(workers) + " workers, from 0 on");
			if (seen[m])
				bad("worker " + std::to_string(m) + " is in two groups of one round");
			if (!g.weight(i))
				bad("worker " + std::to_string(m) + " has weight 0");
			seen[m] = true;
			++count;
			sorted.emplace_back(m, g.weight(i));
		}
		std::sort(sorted.begin(), sorted.end());
		for (std::size_t i = 0; i < sorted.size(); ++i) {
			g.members[i] = sorted[i].first;
			if (!g.weights.empty())
				g.weights[i] = sorted[i].second;
		}
		if (std::adjacent_find(g.weights.begin(), g.weights.end(), std::not_equal_to<>()) ==
		    g.weights.end())
			g.weights.clear();
	}
	if (count != workers) {
		const auto absent = std::find(seen.begin(), seen.end(), false) - seen.begin();
		bad("worker " + std::to_string(absent) +
		    " is in no group of a round; one that shall stay alone is a group of one");
	}
}

std::optional<std::uint64_t> number_in(std::string_view text)
{
	std::uint64_t n = 0;
	const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
	if (text.empty() || error != std::errc() || end != text.data() + text.size())
		return std::nullopt;
	return n;
}

std::uint32_t small_number(std::string_view text, std::string_view what)
{
	const auto n = number_in(text);
	if (!n || *n > max_workers)
		bad("\"" + std::string(text) + "\" is no " + std::string(what) +
		    "; it has to be a number up to " + std::to_string(max_workers));
	return static_cast<std::uint32_t>(*n);
}

std::vector<std::string_view> split(std::string_view text, char separator)
{
	std::vector<std::string_view> parts;
	for (;;) {
		const std::size_t at = text.find(separator);
		parts.push_back(text.substr(0, at));
		if (at == std::string_view::npos)
			return parts;
		text.remove_prefix(at + 1);
	}
}

/* The largest divisor that is at most the root. */
std::uint32_t rows_of_square(std::uint32_t workers)
{
	std::uint32_t rows = 1;
	for (std::uint32_t i = 2; i * i <= workers; ++i)
		if (workers % i == 0)
			rows = i;
	return rows;
}

/* Of @workers in rows of at most @size. */
std::vector<std::uint32_t> unequal_rows(std::uint32_t workers, std::uint32_t size)
{
	return equal_parts(workers, (workers + size - 1) / size);
}

grouping unequal_by_rows(const std::vector<std::uint32_t> &rows)
{
	grouping r;
	rank_t first = 0;
	for (const std::uint32_t row : rows) {
		r.groups.push_back({});
		for (std::uint32_t i = 0; i < row; ++i)
			r.groups.back().members.push_back(first + i);
		first += row;
	}
	return r;
}

/* As many columns as the smallest row has workers; in each @turn the rows are turned by one more. */
grouping unequal_columns(const std::vector<std::uint32_t> &rows, std::uint64_t turn)
{
	const std::uint32_t columns = rows.back();
	grouping r;
	r.groups.resize(columns);
	rank_t first = 0;
	for (const std::uint32_t row : rows) {
		std::vector<std::uint32_t> share(columns);
		for (std::uint32_t i = 0; i < row; ++i)
			++share[i % columns];
		for (std::uint32_t i = 0; i < row; ++i) {
			group &column = r.groups[i % columns];
			column.members.push_back(first + static_cast<rank_t>((i + turn) % row));
			/* A row counts in each column as many times as it has workers; twice that, for
			 * halves. */
			column.weights.push_back(2 * row / share[i % columns]);
		}
		first += row;
	}
	return r;
}

std::uint32_t largest_of(const grouping &r) noexcept
{
	std::size_t most = 0;
	for (const group &g : r.groups)
		most = std::max(most, g.members.size());
	return static_cast<std::uint32_t>(most);
}

/* To prove what a list promises takes the cube of its length. */
constexpr std::uint32_t max_proven_workers = 64, max_proven_rounds = 16;

schedule::promise found_promise(const schedule &s, std::uint32_t count, std::uint32_t k)
{
	bool from_any = true;
	/* Where a multiple of k may stand in the list. */
	const std::uint32_t step = std::gcd(k, count);
	for (std::uint32_t first = 0; first < count; ++first) {
		if (mixes_exactly(s, first, k))
			continue;
		if (first % step == 0)
			return {};
		from_any = false;
	}
	return {k, from_any};
}

} // namespace

const group &grouping::of(rank_t worker) const &
{
	for (const group &g : groups)
		if (std::binary_search(g.members.begin(), g.members.end(), worker))
			return g;
	throw std::out_of_range("schedule: worker " + std::to_string(worker) + " is in no group");
}

schedule::schedule(std::string name, std::uint32_t workers, std::vector<grouping> rounds, promise p)
    : name_(std::move(name)), workers_(workers), rounds_(std::move(rounds)), promise_(p)
{
	check_workers(workers);
	for (grouping &r : rounds_) {
		check(r, workers);
		largest_ = std::max(largest_, largest_of(r));
	}
}

schedule schedule::full(std::uint32_t workers)
{
	check_workers(workers);
	return {"full", workers, {one_group(workers)}, {1, true}};
}

schedule schedule::local(std::uint32_t workers)
{
	check_workers(workers);
	return {"local", workers, {alone(workers)}, {workers == 1 ? 1U : 0U, true}};
}

schedule schedule::pairs(std::uint32_t workers)
{
	check_workers(workers);
	grouping even, odd;
	for (rank_t i = 0; i + 1 < workers; i += 2)
		even.groups.push_back({{i, i + 1}, {}});
	for (rank_t i = 1; i + 1 < workers; i += 2)
		odd.groups.push_back({{i, i + 1}, {}});
	if (workers % 2) {
		even.groups.push_back({{workers - 1}, {}});
		odd.groups.push_back({{0}, {}});
	} else {
		odd.groups.push_back({{0, workers - 1}, {}});
	}
	if (workers <= 2)
		return {"pairs", workers, {std::move(even)}, {1, true}};
	return {"pairs", workers, {std::move(even), std::move(odd)}, {workers == 4 ? 2U : 0U, true}};
}

schedule schedule::mixed_radix(const std::vector<std::uint32_t> &radices)
{
	std::uint64_t workers = 1;
	std::string name;
	for (const std::uint32_t radix : radices) {
		if (!radix)
			bad("a radix is 0");
		workers *= radix;
		check_workers(workers);
		name += (name.empty() ? "radix:" : "x") + std::to_string(radix);
	}
	if (radices.empty())
		bad("there are no radices");

	std::vector<grouping> rounds;
	std::uint64_t below = 1; /* how much one of this digit counts */
	for (const std::uint32_t radix : radices) {
		grouping r;
		for (std::uint64_t first = 0; first < workers; ++first) {
			if (first / below % radix)
				continue;
			group g;
			for (std::uint32_t digit = 0; digit < radix; ++digit)
				g.members.push_back(static_cast<rank_t>(first + digit * below));
			r.groups.push_back(std::move(g));
		}
		below *= radix;
		/* A digit that is always 0 has nothing to average. */
		if (radix > 1)
			rounds.push_back(std::move(r));
	}
	if (rounds.empty())
		rounds.push_back(alone(1));
	const auto count = static_cast<std::uint32_t>(rounds.size());
	return {std::move(name), static_cast<std::uint32_t>(workers), std::move(rounds), {count, true}};
}

schedule schedule::grid(std::uint32_t rows, std::uint32_t columns)
{
	schedule s = mixed_radix({columns, rows});
	s.name_ = "grid:" + std::to_string(rows) + "x" + std::to_string(columns);
	return s;
}

schedule schedule::unequal(std::uint32_t workers, std::uint32_t size)
{
	check_workers(workers);
	if (!size)
		bad("groups of 0 workers");
	const std::string name = "unequal:" + std::to_string(size);
	const auto rows = unequal_rows(workers, size);
	if (rows.size() == 1) {
		schedule s = full(workers);
		s.name_ = name;
		return s;
	}

	schedule s(name, workers, {}, {2, false});
	s.kind_ = kind::unequal;
	s.size_ = size;
	/* A column has at most two of a row, the smallest row one. */
	s.largest_ = std::max(rows.front(), largest_of(unequal_columns(rows, 0)));
	return s;
}

schedule schedule::random(std::uint32_t workers, std::uint32_t size, std::uint64_t seed)
{
	check_workers(workers);
	if (size < 1 || size > workers)
		bad("random groups of " + std::to_string(size) + " of " + std::to_string(workers) +
		    " workers");
	schedule s("random:" + std::to_string(size) + ":" + std::to_string(seed), workers, {}, {});
	s.kind_ = kind::random;
	s.size_ = size;
	s.seed_ = seed;
	s.largest_ = equal_parts(workers, random_groups(workers, size)).front();
	if (s.largest_ == workers)
		s.promise_ = {1, true};
	return s;
}

schedule schedule::listed(std::uint32_t workers, std::vector<grouping> rounds)
{
	if (rounds.empty())
		bad("there are no rounds");
	const auto count = static_cast<std::uint32_t>(rounds.size());
	schedule s("listed", workers, std::move(rounds), {});
	if (workers > max_proven_workers || count > max_proven_rounds)
		return s;
	try {
		for (std::uint32_t k = 1; k <= count && !s.promise_.rounds; ++k)
			s.promise_ = found_promise(s, count, k);
	} catch (const std::overflow_error &) {
		/* It may mix; that is not proven, and so not promised. */
	}
	return s;
}

schedule schedule::parse(std::string_view text, std::uint32_t workers)
{
	check_workers(workers);
	const std::string whole(text);
	const std::size_t plus = text.find("+full:");
	std::uint32_t full_every = 0;
	if (plus != std::string_view::npos) {
		full_every = small_number(text.substr(plus + 6), "number of rounds");
		text = text.substr(0, plus);
	}
	const auto words = split(text, ':');
	const auto is = [&](std::string_view name, std::size_t count) {
		return words[0] == name && words.size() == count;
	};
	const auto radices = [&] {
		std::vector<std::uint32_t> r;
		for (const auto x : split(words[1], 'x'))
			r.push_back(small_number(x, "radix"));
		return r;
	};

	std::optional<schedule> s;
	if (is("full", 1))
		s = full(workers);
	else if (is("local", 1))
		s = local(workers);
	else if (is("pairs", 1))
		s = pairs(workers);
	else if (is("grid", 1))
		s = grid(rows_of_square(workers), workers / rows_of_square(workers));
	else if (is("grid", 2) && radices().size() == 2)
		s = grid(radices()[0], radices()[1]);
	else if (is("radix", 2))
		s = mixed_radix(radices());
	else if (is("unequal", 2))
		s = unequal(workers, small_number(words[1], "group size"));
	else if (is("random", 3) && number_in(words[2]))
		s = random(workers, small_number(words[1], "group size"), *number_in(words[2]));
	else if (!text.empty() && text.find_first_not_of("0123456789,|;") == std::string_view::npos) {
		std::vector<grouping> rounds;
		for (const auto r : split(text, ';')) {
			rounds.push_back({});
			for (const auto g : split(r, '|')) {
				rounds.back().groups.push_back({});
				for (const auto m : split(g, ','))
					rounds.back().groups.back().members.push_back(
					    small_number(m, "worker"));
			}
		}
		s = listed(workers, std::move(rounds));
		s->name_ = text;
	} else {
		bad("\"" + whole +
		    "\" is not known; known are full, local, pairs, grid, grid:RxC, radix:AxB..., "
		    "unequal:SIZE, random:SIZE:SEED and "
		    "rounds as in 0,1|2,3;0,3|1,2, each with +full:H or without");
	}
	if (s->workers() != workers)
		bad("\"" + whole + "\" is for " + std::to_string(s->workers()) + " workers, and there are " +
		    std::to_string(workers));
	return plus == std::string_view::npos ? *s : s->with_full_every(full_every);
}

schedule schedule::with_full_every(std::uint32_t rounds) const
{
	if (!rounds)
		bad("a full average every 0 rounds");
	if (full_every_)
		bad(name_ + " already has a full average every " + std::to_string(full_every_) + " rounds");
	schedule s = *this;
	s.name_ += "+full:" + std::to_string(rounds);
	s.full_every_ = rounds;
	s.largest_ = workers_;
	s.promise_ = {rounds, true};
	return s;
}

grouping schedule::at(std::uint64_t number) const
{
	if (full_every_) {
		if (number % full_every_ == full_every_ - 1)
			return one_group(workers_);
		number -= number / full_every_;
	}
	switch (kind_) {
	case kind::random:
		return random_round(workers_, size_, seed_, number);
	case kind::unequal: {
		const auto rows = unequal_rows(workers_, size_);
		if (number % 2 == 0)
			return unequal_by_rows(rows);
		grouping r = unequal_columns(rows, number / 2);
		check(r, workers_);
		return r;
	}
	case kind::listed:
		break;
	}
	return rounds_[number % rounds_.size()];
}

bool mixes_exactly(const schedule &s, std::uint64_t first, std::uint32_t count)
{
	const std::size_t n = s.workers();
	/* What worker i has is the sum of share[i][j] times what worker j had. */
	std::vector<std::vector<fraction>> share(n, std::vector<fraction>(n));
	for (std::size_t i = 0; i < n; ++i)
		share[i][i] = {1, 1};
	for (std::uint32_t k = 0; k < count; ++k) {
		for (const group &g : s.at(first + k).groups) {
			std::uint64_t sum = 0;
			for (std::size_t m = 0; m < g.members.size(); ++m)
				sum += g.weight(m);
			std::vector<fraction> mean(n);
			for (std::size_t m = 0; m < g.members.size(); ++m)
				for (std::size_t j = 0; j < n; ++j)
					mean[j] =
					    mean[j] + share[g.members[m]][j] * fraction(g.weight(m), sum);
			for (const rank_t member : g.members)
				share[member] = mean;
		}
	}
	const std::vector<fraction> uniform(n, fraction(1, n));
	return std::all_of(share.begin(), share.end(), [&](const auto &row) { return row == uniform; });
}

} // namespace nprdma::sync
