/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A look at memory that may answer with a signal. */
#ifndef NPRDMA_FAR_TESTS_GUARDED_HPP
#define NPRDMA_FAR_TESTS_GUARDED_HPP

#include <csetjmp>
#include <csignal>
#include <cstddef>
#include <unistd.h>

namespace guarded
{

inline thread_local sigjmp_buf back;
inline thread_local volatile bool armed = false;
inline struct sigaction before_bus, before_segv;

inline void handler(int signal)
{
	if (armed)
		siglongjmp(back, signal);
	/* Nobody expects it: the test ends here, and its log says of what. */
	constexpr char said[] =
	    "a page could not be brought, or is not mapped, and the test does not expect it\n";
	(void)!::write(STDERR_FILENO, said, sizeof(said) - 1);
	/* The access is made again. */
	::sigaction(signal, signal == SIGBUS ? &before_bus : &before_segv, nullptr);
}

/* From here on, for all threads; done by what follows. */
inline void install()
{
	static const bool done = [] {
		struct sigaction act = {};

		act.sa_handler = handler;
		::sigaction(SIGBUS, &act, &before_bus);
		::sigaction(SIGSEGV, &act, &before_segv);
		return true;
	}();
	(void)done;
}

/* The signal that @f() dies of, or 0. @f has no destructors to run. */
template <class F> int signal_of(F f)
{
	install();
	const int signal = sigsetjmp(back, 1);
	if (!signal) {
		armed = true;
		f();
	}
	armed = false;
	return signal;
}

} // namespace guarded

#endif
