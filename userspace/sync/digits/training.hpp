/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A worker that learns the digits, and what it has to tell of it. */
#ifndef NPRDMA_SYNC_DIGITS_TRAINING_HPP
#define NPRDMA_SYNC_DIGITS_TRAINING_HPP

#include "data.hpp"
#include "model.hpp"

#include "nprdma/sync/synchroniser.hpp"

#include <string>
#include <vector>

namespace digits
{

enum class exchange { groups, ring, halving_doubling };

struct plan {
	std::string model = "logistic";
	exchange how = exchange::groups;
	bool overlapped = false; /* groups only */
	std::uint32_t epochs = 40;
	std::uint32_t batch = 16; /* images of one worker in one step */
	double rate = 0.1;
	double momentum = 0.9;
	std::uint64_t seed = 1;
	std::uint32_t die_at = 0; /* a step at which to end without a word; 0: never */
};

/* At the end of an epoch. */
struct record {
	std::uint32_t epoch = 0;
	std::uint64_t steps = 0;
	double seconds = 0;           /* since the first step */
	double synchronising = 0;     /* of these, in the exchange */
	std::uint64_t bytes_sent = 0; /* so far */
	double loss = 0;              /* of the training images, this worker's parameters */
	double accuracy = 0;          /* of the test images */
};

template <class T> struct outcome {
	std::vector<record> epochs;
	record last;               /* of the mean of all workers, unless one is absent: then of its own */
	std::vector<T> parameters; /* the same */
	std::string trouble;       /* why it did not come to the end; empty: it did */
};

/*
 * Worker @rank of @workers trains on the images whose number leaves the remainder @rank. Each step
 * synchronises first, and then goes along the gradient with momentum, which stays its own.
 */
template <class T>
[[nodiscard]] outcome<T> train(nprdma::sync::synchroniser<T> &sync, nprdma::sync::rank_t rank,
			       std::uint32_t workers, const data_set<T> &data, const plan &p);

/* Of @model, for the synchroniser. */
[[nodiscard]] std::size_t parameters_of(const std::string &model);

} // namespace digits

#endif
