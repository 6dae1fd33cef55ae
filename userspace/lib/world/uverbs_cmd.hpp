/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * One RDMA_VERBS_IOCTL, built on the stack. libibverbs builds the same for its
 * own calls but exports nothing to do so. Attributes are all mandatory: a
 * kernel that does not know one refuses the call. What goes to the kernel in at
 * most 8 bytes travels in the attribute itself, padded with zeros.
 */
#ifndef NPR_UVERBS_CMD_HPP
#define NPR_UVERBS_CMD_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <span>

namespace npr {

template <unsigned Attrs>
class uverbs_cmd {
public:
	uverbs_cmd(std::uint16_t object, std::uint16_t method) noexcept
	{
		header()->object_id = object;
		header()->method_id = method;
		set_length();
	}

	/* The handle of an object that exists, or 0 for the kernel to put a new one: new_handle(). */
	void idr(std::uint16_t id, std::uint32_t handle) noexcept { add(id, 0, handle); }

	/* A file descriptor that exists. */
	void fd(std::uint16_t id, int fd) noexcept { add(id, 0, static_cast<std::uint64_t>(std::int64_t{fd})); }

	/* The kernel puts a new file descriptor here: read it with new_fd(). */
	void fd_out(std::uint16_t id) noexcept { add(id, 0, 0); }

	template <class T>
	void in(std::uint16_t id, const T &value) noexcept
	{
		in(id, std::as_bytes(std::span(&value, 1)));
	}

	/* The bytes must stay until the call is over. */
	void in(std::uint16_t id, std::span<const std::byte> bytes) noexcept
	{
		std::uint64_t data = 0;

		if (bytes.size() <= sizeof(data))
			std::memcpy(&data, bytes.data(), bytes.size());
		else
			data = reinterpret_cast<std::uintptr_t>(bytes.data());
		add(id, bytes.size(), data);
	}

	template <class T>
	void out(std::uint16_t id, T &value) noexcept
	{
		add(id, sizeof(T), reinterpret_cast<std::uintptr_t>(&value));
	}

	[[nodiscard]] int new_fd(std::uint16_t id) const noexcept
	{
		for (unsigned i = 0; i < header()->num_attrs; ++i)
			if (attrs()[i].attr_id == id)
				return static_cast<int>(attrs()[i].data_s64);
		return -1;
	}

	[[nodiscard]] std::uint32_t new_handle(std::uint16_t id) const noexcept
	{
		return static_cast<std::uint32_t>(new_fd(id));
	}

	void set_driver(std::uint32_t driver) noexcept { header()->driver_id = driver; }

	[[nodiscard]] ib_uverbs_ioctl_hdr *header() noexcept
	{
		return reinterpret_cast<ib_uverbs_ioctl_hdr *>(storage_);
	}
	[[nodiscard]] const ib_uverbs_ioctl_hdr *header() const noexcept
	{
		return reinterpret_cast<const ib_uverbs_ioctl_hdr *>(storage_);
	}
	[[nodiscard]] const ib_uverbs_attr *attrs() const noexcept
	{
		return reinterpret_cast<const ib_uverbs_attr *>(storage_ + sizeof(ib_uverbs_ioctl_hdr));
	}

private:
	static_assert(sizeof(ib_uverbs_ioctl_hdr) % alignof(ib_uverbs_attr) == 0);

	void set_length() noexcept
	{
		header()->length = static_cast<std::uint16_t>(sizeof(ib_uverbs_ioctl_hdr) +
							      header()->num_attrs * sizeof(ib_uverbs_attr));
	}

	void add(std::uint16_t id, std::size_t len, std::uint64_t data) noexcept
	{
		/* more than there is room for would be a bug of the caller: the kernel refuses an empty id */
		if (header()->num_attrs == Attrs)
			return;
		ib_uverbs_attr &a = reinterpret_cast<ib_uverbs_attr *>(
			storage_ + sizeof(ib_uverbs_ioctl_hdr))[header()->num_attrs++];
		a.attr_id = id;
		a.len = static_cast<std::uint16_t>(len);
		a.flags = UVERBS_ATTR_F_MANDATORY;
		a.data = data;
		set_length();
	}

	alignas(8) std::byte storage_[sizeof(ib_uverbs_ioctl_hdr) + Attrs * sizeof(ib_uverbs_attr)] = {};
};

} // namespace npr

#endif
