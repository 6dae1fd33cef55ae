/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The optical recognition of handwritten digits data set (UCI), as Debian's python3-sklearn packages it: 1797
 * images of 8 by 8 pixels from 0 to 16, and the digit of each one.
 */
#ifndef NPRDMA_SYNC_DIGITS_DATA_HPP
#define NPRDMA_SYNC_DIGITS_DATA_HPP

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace digits
{

inline constexpr std::size_t pixels = 64, classes = 10;
inline constexpr const char *debian_file =
    "/usr/lib/python3/dist-packages/sklearn/datasets/data/digits.csv.gz";

template <class T> struct images {
	std::vector<T> pixel; /* images by pixels, 0 to 1 */
	std::vector<std::uint8_t> digit;

	[[nodiscard]] std::size_t count() const noexcept { return digit.size(); }
	[[nodiscard]] const T *operator[](std::size_t i) const noexcept { return pixel.data() + i * pixels; }
};

template <class T> struct data_set {
	images<T> training, test;
};

/* Every fifth image is for tests. Throws std::runtime_error: what is wrong with the file. */
template <class T> [[nodiscard]] data_set<T> load(const std::string &path = debian_file);

} // namespace digits

#endif
