/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Stores of this host: memory, a file, a directory of files. */
#include "owners.hpp"

#include <nprdma/far.hpp>

#include <atomic>
#include <fcntl.h>
#include <linux/fs.h>
#include <map>
#include <mutex>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <vector>

namespace nprdma::far
{

status store::read_many(std::span<const piece> pieces) noexcept
{
	for (const piece &p : pieces)
		if (status s = read(p); !s)
			return s;
	return {};
}

status store::write_many(std::span<const piece> pieces) noexcept
{
	for (const piece &p : pieces)
		if (status s = write(p); !s)
			return s;
	return {};
}

result<data_generation> store::generation() noexcept
{
	return error{EOPNOTSUPP, "store: keeps no generation, and so cannot be mirrored"};
}

status store::set_generation(const data_generation &) noexcept
{
	return generation().why();
}

namespace
{

bool inside(const piece &p, std::uint64_t bytes) noexcept
{
	return p.offset <= bytes && p.memory.size() <= bytes - p.offset;
}

error outside()
{
	return error{EINVAL, "store: the range is outside of it"};
}

/* All of @p; a file that ends before is an error, and no zeros. */
status read_all(int fd, const piece &p, std::uint64_t at)
{
	for (std::size_t done = 0; done < p.memory.size();) {
		const ssize_t n = ::pread(fd, p.memory.data() + done, p.memory.size() - done,
					  static_cast<off_t>(at + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return transport::failure(errno, "store: read from a file");
		if (n == 0)
			return error{EIO, "store: the file has become shorter"};
		done += static_cast<std::size_t>(n);
	}
	return {};
}

status write_all(int fd, const piece &p, std::uint64_t at)
{
	for (std::size_t done = 0; done < p.memory.size();) {
		const ssize_t n = ::pwrite(fd, p.memory.data() + done, p.memory.size() - done,
					   static_cast<off_t>(at + done));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return transport::failure(n < 0 ? errno : EIO, "store: write to a file");
		done += static_cast<std::size_t>(n);
	}
	return {};
}

/* Is there anything but a hole? A file that has become shorter is none: read() says so. */
bool has_data(int fd, std::uint64_t offset, std::uint64_t size) noexcept
{
	const off_t at = ::lseek(fd, static_cast<off_t>(offset), SEEK_DATA);
	struct stat st;

	if (at >= 0)
		return static_cast<std::uint64_t>(at) < offset + size;
	return errno != ENXIO || ::fstat(fd, &st) || static_cast<std::uint64_t>(st.st_size) < offset + size;
}

/* That a disk reported an error, which the kernel says once, and not what was lost. */
class disk_error
{
public:
	/* Of fdatasync(2), or what has been said before. */
	status of(int code, const char *what)
	{
		const std::lock_guard guard(mutex_);

		if (code && !error_.code)
			error_ = {ENOTRECOVERABLE,
				  transport::failure(code, what).text +
				      "; what was written since the last flush() that succeeded may be lost: "
				      "accept_loss(), and write it again"};
		return error_.code ? status(error_) : status{};
	}
	[[nodiscard]] bool none()
	{
		const std::lock_guard guard(mutex_);

		return !error_.code;
	}
	void clear()
	{
		const std::lock_guard guard(mutex_);

		error_ = {0, {}};
	}

private:
	std::mutex mutex_;
	error error_{0, {}};
};

constexpr char generation_name[] = "user.nprdma.generation";

class in_memory final : public store
{
public:
	in_memory(std::uint64_t size, transport::descriptor fd) : bytes_(size), fd_(std::move(fd)) {}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }
	/* Of a memfd, so that pages that were never written need no memory, and need not be asked for. */
	status read(const piece &p) noexcept override
	{
		return inside(p, bytes_) ? read_all(fd_.get(), p, p.offset) : outside();
	}
	status write(const piece &p) noexcept override
	{
		return inside(p, bytes_) ? write_all(fd_.get(), p, p.offset) : outside();
	}
	[[nodiscard]] bool written(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		return has_data(fd_.get(), offset, size);
	}
	result<data_generation> generation() noexcept override { return generation_; }
	status set_generation(const data_generation &to) noexcept override
	{
		generation_ = to;
		return {};
	}
	status discard(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		(void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				  static_cast<off_t>(offset), static_cast<off_t>(size));
		return {};
	}

private:
	const std::uint64_t bytes_;
	const transport::descriptor fd_;
	data_generation generation_;
};

class in_file final : public store
{
public:
	in_file(transport::descriptor fd, std::uint64_t size, bool read_only, bool holes)
	    : fd_(std::move(fd)), bytes_(size), read_only_(read_only), holes_(holes)
	{
	}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }
	status read(const piece &p) noexcept override
	{
		return inside(p, bytes_) ? read_all(fd_.get(), p, p.offset) : outside();
	}
	status write(const piece &p) noexcept override
	{
		if (read_only_)
			return error{EROFS, "store: the file was opened read-only"};
		return inside(p, bytes_) ? write_all(fd_.get(), p, p.offset) : outside();
	}
	[[nodiscard]] bool written(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		return !holes_ || has_data(fd_.get(), offset, size);
	}
	status flush() noexcept override
	{
		return error_.of(!read_only_ && ::fdatasync(fd_.get()) ? errno : 0, "store: fdatasync");
	}
	[[nodiscard]] bool intact() noexcept override { return error_.none(); }
	status accept_loss() noexcept override
	{
		error_.clear();
		return {};
	}
	status discard(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		/* Where there are no holes, the content stays. */
		if (!read_only_ && holes_)
			(void)::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
					  static_cast<off_t>(offset), static_cast<off_t>(size));
		return {};
	}

	/* An attribute of the file; a block device has none that goes with the data. */
	result<data_generation> generation() noexcept override
	{
		data_generation g;

		if (!holes_)
			return store::generation();
		const ssize_t n = ::fgetxattr(fd_.get(), generation_name, &g, sizeof(g));
		if (n == sizeof(g))
			return g;
		return n < 0 && errno == ENODATA
			   ? result<data_generation>(data_generation())
			   : transport::failure(n < 0 ? errno : EIO, "store: the generation of the file");
	}
	status set_generation(const data_generation &to) noexcept override
	{
		if (!holes_)
			return store::set_generation(to);
		if (read_only_)
			return error{EROFS, "store: the file was opened read-only"};
		if (::fsetxattr(fd_.get(), generation_name, &to, sizeof(to), 0))
			return transport::failure(errno, "store: the generation of the file");
		/* This may tell the error of what was written before. */
		if (::fsync(fd_.get()))
			return error_.of(errno, "store: fsync");
		return {};
	}

private:
	const transport::descriptor fd_;
	const std::uint64_t bytes_;
	const bool read_only_, holes_;
	disk_error error_;
};

class in_directory final : public store
{
public:
	in_directory(transport::descriptor directory, std::uint64_t size, std::uint64_t file_bytes,
		     bool read_only)
	    : directory_(std::move(directory)),
	      bytes_(size),
	      file_bytes_(file_bytes),
	      read_only_(read_only),
	      files_((size + file_bytes - 1) / file_bytes)
	{
	}

	[[nodiscard]] std::uint64_t bytes() const noexcept override { return bytes_; }

	status read(const piece &p) noexcept override
	{
		return each(p, [&](const piece &part, std::uint64_t n, std::uint64_t at) -> status {
			result<int> fd = file(n, false);

			if (!fd)
				return fd.why();
			if (*fd >= 0)
				return read_all(*fd, part, at);
			std::memset(part.memory.data(), 0, part.memory.size());
			return {};
		});
	}

	status write(const piece &p) noexcept override
	{
		if (read_only_)
			return error{EROFS, "store: the directory was opened read-only"};
		return each(p, [&](const piece &part, std::uint64_t n, std::uint64_t at) -> status {
			result<int> fd = file(n, true);

			return fd ? write_all(*fd, part, at) : status(fd.why());
		});
	}

	[[nodiscard]] bool written(std::uint64_t offset, std::uint64_t size) noexcept override
	{
		for (std::uint64_t n = offset / file_bytes_; n * file_bytes_ < offset + size; n++) {
			const result<int> fd = file(n, false);
			const std::uint64_t begin = std::max(offset, n * file_bytes_) - n * file_bytes_;
			const std::uint64_t end =
			    std::min(offset + size, (n + 1) * file_bytes_) - n * file_bytes_;

			if (!fd)
				return true;
			if (*fd < 0)
				continue;
			if (has_data(*fd, begin, end - begin))
				return true;
		}
		return false;
	}

	status flush() noexcept override
	{
		const std::lock_guard guard(mutex_);

		int code = 0;

		/* All of them, or one that follows would say later what is said now. */
		for (const auto &f : files_)
			if (f && ::fdatasync(f.get()))
				code = errno;
		/* And the names of those that were made. */
		if (!read_only_ && ::fsync(directory_.get()))
			code = errno;
		return error_.of(code, "store: fdatasync");
	}
	[[nodiscard]] bool intact() noexcept override { return error_.none(); }
	status accept_loss() noexcept override
	{
		error_.clear();
		return {};
	}

	/* A file beside the others. */
	result<data_generation> generation() noexcept override
	{
		const transport::descriptor fd(
		    ::openat(directory_.get(), "generation", O_RDONLY | O_CLOEXEC));
		data_generation g;

		if (!fd && errno == ENOENT)
			return g;
		const ssize_t n = fd ? ::pread(fd.get(), &g, sizeof(g), 0) : -1;
		/* Nothing: it was made, and not written before the host lost power. */
		if (n != sizeof(g) && n != 0)
			return transport::failure(n < 0 ? errno : EIO,
						  "store: the generation of the directory");
		return g;
	}
	status set_generation(const data_generation &to) noexcept override
	{
		if (read_only_)
			return error{EROFS, "store: the directory was opened read-only"};
		const transport::descriptor fd(
		    ::openat(directory_.get(), "generation", O_WRONLY | O_CREAT | O_CLOEXEC, 0666));

		if (!fd || ::pwrite(fd.get(), &to, sizeof(to), 0) != sizeof(to) || ::fsync(fd.get()) ||
		    ::fsync(directory_.get()))
			return transport::failure(errno, "store: the generation of the directory");
		return {};
	}

private:
	template <class F> status each(const piece &p, F f)
	{
		if (!inside(p, bytes_))
			return outside();
		for (std::size_t done = 0; done < p.memory.size();) {
			const std::uint64_t offset = p.offset + done, n = offset / file_bytes_,
					    at = offset % file_bytes_;
			const std::size_t size =
			    std::min<std::uint64_t>(p.memory.size() - done, file_bytes_ - at);

			if (status s = f(piece{offset, p.memory.subspan(done, size)}, n, at); !s)
				return s;
			done += size;
		}
		return {};
	}

	/* -1: there is none, as nothing was written there. */
	result<int> file(std::uint64_t n, bool make)
	{
		const std::lock_guard guard(mutex_);
		transport::descriptor &f = files_[n];

		if (!f) {
			const std::string name = std::to_string(n);
			transport::descriptor fd(::openat(
			    directory_.get(), name.c_str(),
			    (read_only_ ? O_RDONLY : O_RDWR) | O_CLOEXEC | (make ? O_CREAT : 0), 0666));
			if (!fd)
				return errno == ENOENT ? result<int>(-1)
						       : transport::failure(errno, "store: file " + name +
										       " of the directory");
			struct stat st;
			const auto want = static_cast<off_t>(std::min(file_bytes_, bytes_ - n * file_bytes_));
			if (::fstat(fd.get(), &st) || (st.st_size != want && st.st_size != 0))
				return error{EIO,
					     "store: file " + name +
						 " of the directory has another size than it was made with"};
			if (st.st_size == 0 && (read_only_ || ::ftruncate(fd.get(), want)))
				return read_only_ ? result<int>(-1)
						  : transport::failure(errno, "store: file " + name);
			f = std::move(fd);
		}
		return f.get();
	}

	const transport::descriptor directory_;
	const std::uint64_t bytes_, file_bytes_;
	const bool read_only_;
	std::mutex mutex_;
	std::vector<transport::descriptor> files_;
	disk_error error_;
};

} // namespace

std::shared_ptr<store> memory_store(std::uint64_t bytes)
{
	transport::descriptor fd(::memfd_create("nprdma-far-store", MFD_CLOEXEC));

	if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)))
		return nullptr;
	return std::make_shared<in_memory>(bytes, std::move(fd));
}

result<std::shared_ptr<store>> file_store(const std::string &path, const file_options &how)
{
	const int flags =
	    (how.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC | (how.bytes && !how.read_only ? O_CREAT : 0);
	transport::descriptor fd;

	if (how.direct)
		fd = transport::descriptor(::open(path.c_str(), flags | O_DIRECT, 0666));
	if (!fd)
		fd = transport::descriptor(::open(path.c_str(), flags, 0666));
	struct stat st;
	if (!fd || ::fstat(fd.get(), &st))
		return transport::failure(errno, path);
	std::uint64_t size = static_cast<std::uint64_t>(st.st_size);
	if (S_ISBLK(st.st_mode)) {
		if (::ioctl(fd.get(), BLKGETSIZE64, &size))
			return transport::failure(errno, path);
	} else if (!S_ISREG(st.st_mode)) {
		return error{EINVAL, path + ": neither a regular file nor a block device"};
	} else if (how.bytes && !how.read_only) {
		if (::ftruncate(fd.get(), static_cast<off_t>(how.bytes)))
			return transport::failure(errno, path);
		size = how.bytes;
	}
	if (!size)
		return error{EINVAL, path + ": empty; say how many bytes it is to have"};
	return std::shared_ptr<store>(
	    std::make_shared<in_file>(std::move(fd), size, how.read_only, S_ISREG(st.st_mode)));
}

result<std::shared_ptr<store>> sparse_store(const std::string &directory, std::uint64_t bytes,
					    const sparse_options &how)
{
	if (!how.file_bytes || how.file_bytes % 4096)
		return error{EINVAL, directory + ": the size of its files is a multiple of 4096"};
	if (!how.read_only && bytes && ::mkdir(directory.c_str(), 0777) && errno != EEXIST)
		return transport::failure(errno, directory);
	transport::descriptor d(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	if (!d)
		return transport::failure(errno, directory);
	std::uint64_t sizes[2] = {bytes, how.file_bytes};
	transport::descriptor meta(::openat(d.get(), "sizes", O_RDONLY | O_CLOEXEC));
	if (meta) {
		char text[64]{};
		unsigned long long total, each;

		if (::pread(meta.get(), text, sizeof(text) - 1, 0) < 0 ||
		    std::sscanf(text, "%llu %llu", &total, &each) != 2 || !total || !each || each % 4096 ||
		    total > 1ULL << 46)
			return error{EIO, directory + ": its file \"sizes\" is damaged"};
		if (bytes && bytes != total)
			return error{EINVAL,
				     directory + ": was made with " + std::to_string(total) + " bytes"};
		sizes[0] = total;
		sizes[1] = each;
	} else if (!bytes || how.read_only) {
		return error{ENOENT, directory + ": not a sparse store; say how many bytes it is to have"};
	} else {
		const std::string text = std::to_string(bytes) + " " + std::to_string(how.file_bytes) + "\n";
		transport::descriptor made(
		    ::openat(d.get(), "sizes", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));

		if (!made ||
		    ::write(made.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
			return transport::failure(errno, directory + "/sizes");
	}
	if (sizes[0] / sizes[1] > 1 << 20)
		return error{EINVAL, directory + ": more than a million files; make them larger"};
	return std::shared_ptr<store>(
	    std::make_shared<in_directory>(std::move(d), sizes[0], sizes[1], how.read_only));
}

} // namespace nprdma::far
