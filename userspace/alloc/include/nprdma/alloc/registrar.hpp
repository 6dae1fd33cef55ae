/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A registrar makes memory known to one adapter, or to nobody but this host. An arena has one for each protection
 * domain, and does not know what they are. Each counts what it does, so that "nothing is registered after
 * the beginning" can be tested.
 */
#ifndef NPRDMA_ALLOC_REGISTRAR_HPP
#define NPRDMA_ALLOC_REGISTRAR_HPP

#include <nprdma/alloc/export.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace nprdma::alloc {

struct keys {
	std::uint32_t lkey = 0;
	std::uint32_t rkey = 0;
};

/* Where a pointer is, as requests name it. A peer counts from @base, which is the registration's. */
struct location {
	std::uint32_t lkey = 0;
	std::uint32_t rkey = 0;
	std::uint64_t base = 0;
	std::uint64_t offset = 0;

	[[nodiscard]] std::uint64_t address() const noexcept { return base + offset; }
};

class registrar;

/* Lasts as long as the object. */
class NPRDMA_ALLOC_API registration {
public:
	virtual ~registration();
	registration(const registration &) = delete;
	registration &operator=(const registration &) = delete;

	[[nodiscard]] alloc::keys keys() const noexcept { return keys_; }

protected:
	registration(registrar &by, alloc::keys keys) noexcept;

private:
	registrar &by_;
	alloc::keys keys_;
};

/* It has to outlive what it registered. Any thread may call it. */
class NPRDMA_ALLOC_API registrar {
public:
	struct counts {
		std::uint64_t made;
		std::uint64_t ended;
	};

	virtual ~registrar();
	registrar(const registrar &) = delete;
	registrar &operator=(const registrar &) = delete;

	/* Throws std::system_error. */
	[[nodiscard]] virtual std::unique_ptr<registration> add(std::span<std::byte> memory) = 0;
	/* Pages stay in memory, and must not be exchanged while they are registered. */
	[[nodiscard]] virtual bool pins() const noexcept = 0;

	[[nodiscard]] counts count() const noexcept
	{
		/* relaxed: numbers to look at */
		return {made_.load(std::memory_order_relaxed), ended_.load(std::memory_order_relaxed)};
	}

protected:
	registrar() = default;

private:
	friend registration;
	std::atomic<std::uint64_t> made_ = 0;
	std::atomic<std::uint64_t> ended_ = 0;
};

enum class pinning { unpinned, pinned };

/*
 * For machines without RDMA, and for tests: no adapter knows the memory, and keys are numbers. As "pinned"
 * it locks pages in memory by mlock(2), within RLIMIT_MEMLOCK, as an adapter would pin them.
 */
class NPRDMA_ALLOC_API host_registrar final : public registrar {
public:
	explicit host_registrar(pinning how = pinning::unpinned) noexcept : how_(how) {}
	[[nodiscard]] std::unique_ptr<registration> add(std::span<std::byte> memory) override;
	[[nodiscard]] bool pins() const noexcept override { return how_ == pinning::pinned; }

private:
	pinning how_;
	std::atomic<std::uint32_t> last_key_ = 0;
};

} // namespace nprdma::alloc

#endif
