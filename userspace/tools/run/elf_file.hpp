/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What the header of a program or of a library says of how it is loaded. */
#ifndef NPR_RUN_ELF_FILE_HPP
#define NPR_RUN_ELF_FILE_HPP

#include <cstdint>
#include <optional>
#include <string>

namespace npr::run
{

struct elf_file {
	/* Together they say for which machine it is. */
	std::uint8_t bits = 0, byte_order = 0;
	std::uint16_t machine = 0;
	bool shared_object = false; /* also a program that can be loaded anywhere */
	/* The dynamic loader (PT_INTERP) of a program. Without one it is static, or a library. */
	std::string loader;

	[[nodiscard]] bool same_machine(const elf_file &other) const noexcept
	{
		return bits == other.bits && byte_order == other.byte_order && machine == other.machine;
	}
};

/* Nothing: no ELF file, or one whose headers lead out of it. */
[[nodiscard]] std::optional<elf_file> read_elf(int fd);

/* What a script names behind "#!": without arguments. Nothing: no script. */
[[nodiscard]] std::optional<std::string> read_script(int fd);

} // namespace npr::run

#endif
