// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "nprdma/sync/job.hpp"

#include "nprdma/sync/schedule.hpp"

#include <pmix.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <unistd.h>

namespace nprdma::sync
{
namespace
{

void check(pmix_status_t status, const char *what)
{
	if (status != PMIX_SUCCESS)
		throw std::runtime_error(std::string("PMIx: ") + what + ": " + PMIx_Error_string(status));
}

pmix_proc_t process(const std::string &job_name, pmix_rank_t rank)
{
	pmix_proc_t p;

	PMIX_LOAD_PROCID(&p, job_name.c_str(), rank);
	return p;
}

/* A value that PMIx has made, and that it has to be given back to. */
class got
{
public:
	got(const pmix_proc_t &whose, const char *key)
	{
		check(PMIx_Get(&whose, key, nullptr, 0, &value_), key);
	}
	~got() { PMIX_VALUE_RELEASE(value_); }
	got(const got &) = delete;
	got &operator=(const got &) = delete;
	const pmix_value_t *operator->() const noexcept { return value_; }

private:
	pmix_value_t *value_ = nullptr;
};

} // namespace

job::job()
{
	/* PMIx_Init() without a launcher fails only after a search for one that takes its time. */
	if (!std::getenv("PMIX_RANK")) {
		job_name_ = std::to_string(::getpid());
		return;
	}
	pmix_proc_t me;

	PMIX_PROC_CONSTRUCT(&me);
	check(PMIx_Init(&me, nullptr, 0), "initialisation; is the process started by a launcher with PMIx?");
	job_name_ = me.nspace;
	rank_ = me.rank;
	try {
		const got size(process(job_name_, PMIX_RANK_WILDCARD), PMIX_JOB_SIZE);

		if (size->type != PMIX_UINT32 || !size->data.uint32 || size->data.uint32 > max_workers ||
		    rank_ >= size->data.uint32)
			throw std::runtime_error("PMIx: the job has no size, or one beyond " +
						 std::to_string(max_workers));
		size_ = size->data.uint32;
	} catch (...) {
		PMIx_Finalize(nullptr, 0);
		throw;
	}
	launched_ = true;
}

job::~job()
{
	if (launched_)
		PMIx_Finalize(nullptr, 0);
}

std::string job::name() const
{
	/* It is part of addresses; a launcher may put anything into its own. */
	std::string name = "sync-" +
			   job_name_.substr(job_name_.size() - std::min<std::size_t>(job_name_.size(), 60)) +
			   "-" + std::to_string(rank_);

	for (char &c : name)
		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')))
			c = '-';
	return name;
}

std::vector<std::string> job::exchange(std::string_view key, const std::string &mine)
{
	if (!launched_)
		return {mine};
	const std::string full_key = "nprdma.sync." + std::string(key);
	std::vector<std::string> all;
	pmix_value_t value;
	pmix_info_t collect;
	bool yes = true;

	PMIX_VALUE_LOAD(&value, mine.c_str(), PMIX_STRING);
	const pmix_status_t put = PMIx_Put(PMIX_GLOBAL, full_key.c_str(), &value);
	PMIX_VALUE_DESTRUCT(&value);
	check(put, "to say a word to the others");
	check(PMIx_Commit(), "to say a word to the others");
	PMIX_INFO_LOAD(&collect, PMIX_COLLECT_DATA, &yes, PMIX_BOOL);
	const pmix_proc_t everybody = process(job_name_, PMIX_RANK_WILDCARD);
	check(PMIx_Fence(&everybody, 1, &collect, 1), "to wait for the others");
	for (std::uint32_t r = 0; r < size_; ++r) {
		const got v(process(job_name_, r), full_key.c_str());

		if (v->type != PMIX_STRING || !v->data.string)
			throw std::runtime_error("PMIx: process " + std::to_string(r) +
						 " has said no word as " + full_key);
		all.emplace_back(v->data.string);
	}
	return all;
}

} // namespace nprdma::sync
