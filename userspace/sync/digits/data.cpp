// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "data.hpp"

#include <charconv>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <zlib.h>

namespace digits
{
namespace
{

std::string unpacked(const std::string &path)
{
	constexpr std::size_t most = std::size_t{16} << 20;
	const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
	if (!file)
		throw std::runtime_error(path + " cannot be read; it is in Debian's python3-sklearn");
	std::string text;
	for (char buffer[1 << 16];;) {
		const int n = gzread(file.get(), buffer, sizeof(buffer));
		if (n < 0 || text.size() > most)
			throw std::runtime_error(path + " is damaged, or too large to be the digits data");
		if (n == 0)
			return text;
		text.append(buffer, static_cast<std::size_t>(n));
	}
}

} // namespace

template <class T> data_set<T> load(const std::string &path)
{
	const std::string text = unpacked(path);
	data_set<T> set;
	std::size_t line = 0;

	for (std::string_view rest = text; !rest.empty(); ++line) {
		const std::size_t end = rest.find('\n');
		std::string_view row = rest.substr(0, end);
		images<T> &to = line % 5 == 4 ? set.test : set.training;

		rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
		for (std::size_t i = 0; i <= pixels; ++i) {
			const std::size_t comma = row.find(',');
			double value = -1;
			const std::string_view word = row.substr(0, comma);
			const auto [stop, error] =
			    std::from_chars(word.data(), word.data() + word.size(), value);

			if (error != std::errc() || !(value >= 0 && value <= (i < pixels ? 16 : 9)) ||
			    (comma == std::string_view::npos) != (i == pixels))
				throw std::runtime_error(path + ", line " + std::to_string(line + 1) +
							 ": 64 pixels from 0 to 16 and a digit are expected");
			if (i < pixels)
				to.pixel.push_back(static_cast<T>(value / 16));
			else
				to.digit.push_back(static_cast<std::uint8_t>(value));
			row.remove_prefix(comma == std::string_view::npos ? row.size() : comma + 1);
		}
	}
	if (set.test.count() < 10)
		throw std::runtime_error(path + " has too few images");
	return set;
}

template data_set<float> load(const std::string &);
template data_set<double> load(const std::string &);

} // namespace digits
