/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What can be wrong with a call. Each says what was asked for and why it cannot be; errors of the
 * system are std::system_error.
 */
#ifndef NPRDMA_ALLOC_ERRORS_HPP
#define NPRDMA_ALLOC_ERRORS_HPP

#include <nprdma/alloc/export.hpp>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace nprdma::alloc {

/* For code that expects what every memory_resource throws. */
class NPRDMA_ALLOC_API out_of_memory : public std::bad_alloc {
public:
	explicit out_of_memory(const std::string &what) : what_(std::make_shared<const std::string>(what)) {}
	[[nodiscard]] const char *what() const noexcept override { return what_->c_str(); }

private:
	std::shared_ptr<const std::string> what_; /* copies of an exception must not throw */
};

/* A size or an alignment that no block can have, or that the block at this address has not. */
class NPRDMA_ALLOC_API bad_size : public std::invalid_argument {
	using std::invalid_argument::invalid_argument;
};

/* An address that is not of this arena. */
class NPRDMA_ALLOC_API foreign_pointer : public std::invalid_argument {
	using std::invalid_argument::invalid_argument;
};

/* An address of the arena where no block in use begins: it was freed already, or is inside of one. */
class NPRDMA_ALLOC_API double_free : public std::logic_error {
	using std::logic_error::logic_error;
};

/* What a peer or a file sent cannot be an object. */
class NPRDMA_ALLOC_API bad_object : public std::runtime_error {
	using std::runtime_error::runtime_error;
};

} // namespace nprdma::alloc

#endif
