/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Two classifiers whose parameters are one flat vector: softmax regression, and a network with one hidden
 * layer that is normalised over the batch. What the optimiser does not move, the running mean and variance of
 * that layer, comes last in the vector, and is averaged with the rest.
 */
#ifndef NPRDMA_SYNC_DIGITS_MODEL_HPP
#define NPRDMA_SYNC_DIGITS_MODEL_HPP

#include "data.hpp"

#include <memory>
#include <span>
#include <string_view>

namespace digits
{

template <class T> class model
{
public:
	virtual ~model() = default;

	[[nodiscard]] virtual std::size_t parameters() const noexcept = 0; /* all */
	[[nodiscard]] virtual std::size_t moved() const noexcept = 0; /* by the optimiser: the first ones */
	/* The same for each worker that begins with the same @seed. */
	virtual void initialise(std::span<T> x, std::uint64_t seed) const = 0;
	/*
	 * The mean loss (cross entropy, in nats) of the images @batch of @set, its gradient at @x to
	 * @gradient, and the statistics in @x brought up to date.
	 */
	virtual T learn(std::span<T> x, const images<T> &set, std::span<const std::size_t> batch,
			std::span<T> gradient) = 0;

	struct score {
		T loss;
		double accuracy; /* 0 to 1 */
	};
	/* With the running statistics. */
	[[nodiscard]] virtual score evaluate(std::span<const T> x, const images<T> &set) = 0;
};

/* "logistic" or "network". Throws std::invalid_argument. */
template <class T> [[nodiscard]] std::unique_ptr<model<T>> make_model(std::string_view name);

} // namespace digits

#endif
