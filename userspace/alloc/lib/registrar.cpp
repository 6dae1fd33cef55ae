/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include <nprdma/alloc/registrar.hpp>

#include <cerrno>
#include <string>
#include <sys/mman.h>
#include <system_error>

namespace nprdma::alloc {

/* relaxed, here and below: numbers to look at, see registrar::count() */
registration::registration(registrar &by, alloc::keys keys) noexcept : by_(by), keys_(keys)
{
	by_.made_.fetch_add(1, std::memory_order_relaxed);
}

registration::~registration()
{
	by_.ended_.fetch_add(1, std::memory_order_relaxed);
}

registrar::~registrar() = default;

std::unique_ptr<registration> host_registrar::add(std::span<std::byte> memory)
{
	struct locked final : registration {
		locked(registrar &by, alloc::keys keys, std::span<std::byte> bytes)
		    : registration(by, keys), bytes_(bytes)
		{
		}
		~locked() override
		{
			if (!bytes_.empty())
				(void)munlock(bytes_.data(), bytes_.size());
		}

	private:
		std::span<std::byte> bytes_;
	};
	const std::span<std::byte> to_lock = pins() ? memory : std::span<std::byte>();

	if (!to_lock.empty() && mlock(to_lock.data(), to_lock.size()))
		throw std::system_error(errno, std::generic_category(),
					"locking " + std::to_string(to_lock.size()) +
						" bytes in memory; \"ulimit -l\" says how many KiB are allowed");
	/* relaxed: a number that no other has */
	const std::uint32_t key = last_key_.fetch_add(1, std::memory_order_relaxed) + 1;
	try {
		return std::make_unique<locked>(*this, alloc::keys{key, key}, to_lock);
	} catch (...) {
		if (!to_lock.empty())
			(void)munlock(to_lock.data(), to_lock.size());
		throw;
	}
}

} // namespace nprdma::alloc
