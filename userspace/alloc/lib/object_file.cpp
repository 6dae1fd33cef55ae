/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A file of objects: one after the other as they travel, each at a multiple of 64 bytes. */
#include "mapping.hpp"
#include "object_body.hpp"

#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace nprdma::alloc {
namespace {

void write_all(int fd, std::span<const std::byte> bytes, const std::string &path)
{
	while (!bytes.empty()) {
		const ssize_t n = write(fd, bytes.data(), bytes.size());
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			npra::fail("writing " + path);
		bytes = bytes.subspan(static_cast<std::size_t>(n));
	}
}

/* Less than all only if the file has ended. */
void read_all(int fd, std::span<std::byte> bytes, const std::string &path)
{
	while (!bytes.empty()) {
		const ssize_t n = read(fd, bytes.data(), bytes.size());
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			npra::fail("reading " + path);
		if (!n)
			throw bad_object(path + " became shorter while it was read");
		bytes = bytes.subspan(static_cast<std::size_t>(n));
	}
}

} // namespace

void save(const std::string &path, std::span<const object> objects)
{
	/* Beside it, and in its place when all is written. */
	const std::string part = path + ".part";
	const npra::unique_fd file(open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
	if (file.get() < 0)
		npra::fail("making " + part);
	try {
		constexpr std::array<std::byte, 64> zeros{};
		for (const object &o : objects) {
			if (!o)
				throw bad_object("an empty object in a file");
			const object::body &b = *o.body_;
			object_header h = b.fresh_header();
			h.checksum = b.checksum();
			write_all(file.get(), std::as_bytes(std::span(&h, 1)), part);
			for (const auto bytes : {b.metadata, b.data}) {
				write_all(file.get(), bytes, part);
				write_all(file.get(), std::span(zeros).first(-bytes.size() % 64), part);
			}
		}
		if (fsync(file.get()))
			npra::fail("writing " + part);
		if (std::rename(part.c_str(), path.c_str()))
			npra::fail("renaming " + part);
	} catch (...) {
		(void)unlink(part.c_str());
		throw;
	}
}

std::vector<object> load(arena &home, const std::string &path)
{
	std::vector<object> all;
	struct stat st;

	/* Of a pipe open() would wait for a writer. */
	const npra::unique_fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
	if (file.get() < 0 || fstat(file.get(), &st))
		npra::fail("opening " + path);
	if (!S_ISREG(st.st_mode))
		throw bad_object(path + " is no regular file");
	auto left = static_cast<std::size_t>(st.st_size);
	while (left) {
		const std::string where =
			path + ", at byte " + std::to_string(static_cast<std::size_t>(st.st_size) - left) + ": ";
		object_header h;
		if (left < sizeof(h))
			throw bad_object(where + std::to_string(left) + " bytes are left, and a header has 64");
		read_all(file.get(), std::as_writable_bytes(std::span(&h, 1)), path);
		std::size_t size;
		try {
			size = (object::size_of(h) + 63) & ~std::size_t{63};
		} catch (const bad_object &e) {
			throw bad_object(where + e.what());
		}
		if (size > left)
			throw bad_object(where + "an object of " + std::to_string(size) + " bytes, where the file has " +
					 std::to_string(left) + " more");
		buffer b = home.acquire(size);
		std::memcpy(b.data(), &h, sizeof(h));
		read_all(file.get(), b.bytes().subspan(sizeof(h)), path);
		if (!h.checksum)
			throw bad_object(where + "the object has no checksum, and save() writes one to each");
		all.push_back(object::accept(std::move(b)));
		if (!all.back().intact())
			throw bad_object(where + "the object is damaged: its checksum is another one");
		left -= size;
	}
	return all;
}

} // namespace nprdma::alloc
