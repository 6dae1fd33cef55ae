// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "model.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

namespace digits
{
namespace
{

/* Its loss; the gradient of it replaces @z, the inputs of the softmax. */
template <class T> T softmax_loss(std::array<T, classes> &z, std::size_t digit) noexcept
{
	const T top = *std::max_element(z.begin(), z.end());
	T sum = 0;
	for (T &v : z)
		sum += v = std::exp(v - top);
	const T loss = std::log(sum) - std::log(z[digit]);
	for (T &v : z)
		v /= sum;
	z[digit] -= 1;
	return loss;
}

/* weight is classes by @n. */
template <class T>
std::array<T, classes> outputs(const T *weight, const T *bias, const T *input, std::size_t n) noexcept
{
	std::array<T, classes> z;
	for (std::size_t c = 0; c < classes; ++c) {
		z[c] = bias[c];
		for (std::size_t i = 0; i < n; ++i)
			z[c] += weight[c * n + i] * input[i];
	}
	return z;
}

template <class T>
void add_score(typename model<T>::score &s, std::array<T, classes> &z, std::size_t digit,
	       std::size_t count) noexcept
{
	const auto best = static_cast<std::size_t>(std::max_element(z.begin(), z.end()) - z.begin());
	s.accuracy += (best == digit) / static_cast<double>(count);
	s.loss += softmax_loss(z, digit) / static_cast<T>(count);
}

/* weights (classes by pixels), biases */
template <class T> class logistic final : public model<T>
{
public:
	[[nodiscard]] std::size_t parameters() const noexcept override { return classes * pixels + classes; }
	[[nodiscard]] std::size_t moved() const noexcept override { return parameters(); }
	void initialise(std::span<T> x, std::uint64_t) const override { std::fill(x.begin(), x.end(), T(0)); }

	T learn(std::span<T> x, const images<T> &set, std::span<const std::size_t> batch,
		std::span<T> gradient) override
	{
		T loss = 0;
		const T share = T(1) / static_cast<T>(batch.size());
		std::fill(gradient.begin(), gradient.end(), T(0));
		for (const std::size_t i : batch) {
			auto z = outputs(x.data(), x.data() + classes * pixels, set[i], pixels);
			loss += softmax_loss(z, set.digit[i]) * share;
			for (std::size_t c = 0; c < classes; ++c) {
				for (std::size_t k = 0; k < pixels; ++k)
					gradient[c * pixels + k] += z[c] * set[i][k] * share;
				gradient[classes * pixels + c] += z[c] * share;
			}
		}
		return loss;
	}

	[[nodiscard]] typename model<T>::score evaluate(std::span<const T> x, const images<T> &set) override
	{
		typename model<T>::score s{};
		for (std::size_t i = 0; i < set.count(); ++i) {
			auto z = outputs(x.data(), x.data() + classes * pixels, set[i], pixels);
			add_score(s, z, set.digit[i], set.count());
		}
		return s;
	}
};

template <class T> class network final : public model<T>
{
	static constexpr std::size_t hidden = 32;
	static constexpr T tiny = T(1e-5), keep = T(0.9);

	/* Of the flat vector: weights (hidden by pixels), scale and shift of the hidden layer, weights
	 * (classes by hidden), biases, and the running mean and variance. */
	static constexpr std::size_t w1 = 0, scale = w1 + hidden * pixels, shift = scale + hidden,
				     w2 = shift + hidden, b2 = w2 + classes * hidden, mean = b2 + classes,
				     variance = mean + hidden, all = variance + hidden;

public:
	[[nodiscard]] std::size_t parameters() const noexcept override { return all; }
	[[nodiscard]] std::size_t moved() const noexcept override { return mean; }

	void initialise(std::span<T> x, std::uint64_t seed) const override
	{
		const auto draw = [&](std::size_t first, std::size_t count, double width) {
			for (std::size_t i = 0; i < count; ++i) {
				/* splitmix64 */
				std::uint64_t z = (seed += 0x9e3779b97f4a7c15);
				z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
				z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
				z ^= z >> 31;
				x[first + i] =
				    static_cast<T>((static_cast<double>(z >> 11) / 0x1p52 - 1) * width);
			}
		};
		std::fill(x.begin(), x.end(), T(0));
		draw(w1, hidden * pixels, std::sqrt(6.0 / pixels));
		draw(w2, classes * hidden, std::sqrt(6.0 / hidden));
		std::fill_n(x.begin() + scale, hidden, T(1));
		std::fill_n(x.begin() + variance, hidden, T(1));
	}

	T learn(std::span<T> x, const images<T> &set, std::span<const std::size_t> batch,
		std::span<T> gradient) override
	{
		const std::size_t n = batch.size();
		const T share = T(1) / static_cast<T>(n);
		T loss = 0;

		std::fill(gradient.begin(), gradient.end(), T(0));
		normalised_.resize(n * hidden);
		active_.resize(n * hidden);
		back_.assign(n * hidden, T(0));
		std::array<T, hidden> inverse;
		for (std::size_t h = 0; h < hidden; ++h) {
			T sum = 0, squares = 0;
			for (std::size_t b = 0; b < n; ++b) {
				T v = 0;
				for (std::size_t k = 0; k < pixels; ++k)
					v += x[w1 + h * pixels + k] * set[batch[b]][k];
				normalised_[b * hidden + h] = v;
				sum += v;
			}
			const T centre = sum * share;
			for (std::size_t b = 0; b < n; ++b)
				squares += (normalised_[b * hidden + h] - centre) *
					   (normalised_[b * hidden + h] - centre);
			const T spread = squares * share;
			inverse[h] = 1 / std::sqrt(spread + tiny);
			x[mean + h] = keep * x[mean + h] + (1 - keep) * centre;
			x[variance + h] = keep * x[variance + h] + (1 - keep) * spread;
			for (std::size_t b = 0; b < n; ++b) {
				T &v = normalised_[b * hidden + h];
				v = (v - centre) * inverse[h];
				active_[b * hidden + h] = std::max(T(0), v * x[scale + h] + x[shift + h]);
			}
		}
		for (std::size_t b = 0; b < n; ++b) {
			auto z = outputs(&x[w2], &x[b2], &active_[b * hidden], hidden);
			loss += softmax_loss(z, set.digit[batch[b]]) * share;
			for (std::size_t c = 0; c < classes; ++c) {
				gradient[b2 + c] += z[c] * share;
				for (std::size_t h = 0; h < hidden; ++h) {
					gradient[w2 + c * hidden + h] +=
					    z[c] * active_[b * hidden + h] * share;
					back_[b * hidden + h] += z[c] * x[w2 + c * hidden + h] * share;
				}
			}
		}
		/* Through the ReLU, and through the normalisation, where each image moves the batch's mean
		 * and variance. */
		for (std::size_t h = 0; h < hidden; ++h) {
			T sum = 0, product = 0;
			for (std::size_t b = 0; b < n; ++b) {
				T &d = back_[b * hidden + h];
				if (active_[b * hidden + h] <= 0)
					d = 0;
				sum += d;
				product += d * normalised_[b * hidden + h];
			}
			gradient[scale + h] = product;
			gradient[shift + h] = sum;
			for (std::size_t b = 0; b < n; ++b) {
				const T d = x[scale + h] * inverse[h] *
					    (back_[b * hidden + h] - share * sum -
					     share * product * normalised_[b * hidden + h]);
				for (std::size_t k = 0; k < pixels; ++k)
					gradient[w1 + h * pixels + k] += d * set[batch[b]][k];
			}
		}
		return loss;
	}

	[[nodiscard]] typename model<T>::score evaluate(std::span<const T> x, const images<T> &set) override
	{
		typename model<T>::score s{};
		for (std::size_t i = 0; i < set.count(); ++i) {
			std::array<T, hidden> a;
			for (std::size_t h = 0; h < hidden; ++h) {
				T v = 0;
				for (std::size_t k = 0; k < pixels; ++k)
					v += x[w1 + h * pixels + k] * set[i][k];
				v = (v - x[mean + h]) / std::sqrt(x[variance + h] + tiny);
				a[h] = std::max(T(0), v * x[scale + h] + x[shift + h]);
			}
			auto z = outputs(&x[w2], &x[b2], a.data(), hidden);
			add_score(s, z, set.digit[i], set.count());
		}
		return s;
	}

private:
	std::vector<T> normalised_, active_, back_; /* batch by hidden */
};

} // namespace

template <class T> std::unique_ptr<model<T>> make_model(std::string_view name)
{
	if (name == "logistic")
		return std::make_unique<logistic<T>>();
	if (name == "network")
		return std::make_unique<network<T>>();
	throw std::invalid_argument("model \"" + std::string(name) + "\": there are logistic and network");
}

template std::unique_ptr<model<float>> make_model(std::string_view);
template std::unique_ptr<model<double>> make_model(std::string_view);

} // namespace digits
