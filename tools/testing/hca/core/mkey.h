/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Memory keys: who may access which addresses, and where those are.
 */
#ifndef NPHCA_MKEY_H
#define NPHCA_MKEY_H

#include <array>
#include <cstdint>
#include <vector>

#include "bits.h"

namespace nphca {

/* Rights, as an access needs them and a key grants them */
enum : uint8_t { LOCAL_READ = 1, LOCAL_WRITE = 2, REMOTE_READ = 4, REMOTE_WRITE = 8, REMOTE_ATOMIC = 16 };

enum class mem_result : uint8_t { ok, protection, dma_fault };

/* On whose behalf memory is accessed. */
struct accessor {
	uint32_t pd, qpn;
	bool privileged; /* the driver's own UMR queue serves keys of all domains */
};

struct mkey {
	std::array<uint8_t, mkc_size> context{}; /* as the driver reads it back */
	uint32_t index = 0;
	uint8_t variant = 0; /* low byte of the key */
	bool free = false, umr_enabled = false, remote_invalidate = false, any_length = false;
	uint8_t rights = 0, mode = 0, log_page_size = 12;
	uint32_t pd = 0, qpn = 0xffffff;
	uint64_t start = 0, length = 0;
	/* Pages, one word each, or indirections, two: byte count and key, address. */
	std::vector<uint64_t> xlt;
	size_t xlt_capacity = 0; /* words that the driver reserved */

	void decode() noexcept; /* all of the above from the context */
};

} // namespace nphca

#endif
