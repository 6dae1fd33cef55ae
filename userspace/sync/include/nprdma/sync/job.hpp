/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The processes that a launcher with PMIx (mpirun, prun, srun) has started together: who they are, and words
 * between them. */
#ifndef NPRDMA_SYNC_JOB_HPP
#define NPRDMA_SYNC_JOB_HPP

#include <nprdma/export.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nprdma::sync
{

/* One for each process. Everything throws std::runtime_error, which says what PMIx said. */
class NPRDMA_API job
{
public:
	/* Without a launcher, a job of this process alone. */
	job();
	~job();
	job(const job &) = delete;
	job &operator=(const job &) = delete;

	[[nodiscard]] std::uint32_t rank() const noexcept { return rank_; }
	[[nodiscard]] std::uint32_t size() const noexcept { return size_; }
	/* Of this process: no other one on the host has it. */
	[[nodiscard]] std::string name() const;

	/* What each process says under @key, by rank. All call it, with the same keys in the same order. */
	[[nodiscard]] std::vector<std::string> exchange(std::string_view key, const std::string &mine);

private:
	std::string job_name_;
	std::uint32_t rank_ = 0, size_ = 1;
	bool launched_ = false;
};

} // namespace nprdma::sync

#endif
