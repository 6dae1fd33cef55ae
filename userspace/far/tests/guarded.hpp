/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A look at memory that may answer with a signal. */
#ifndef NPRDMA_FAR_TESTS_GUARDED_HPP
#define NPRDMA_FAR_TESTS_GUARDED_HPP

#include <csetjmp>
#include <csignal>
#include <cstddef>

namespace guarded
{

inline thread_local sigjmp_buf back;
inline thread_local volatile bool armed = false;

inline void handler(int signal)
{
	if (!armed) {
		::signal(signal, SIG_DFL);
		::raise(signal);
		return;
	}
	siglongjmp(back, signal);
}

/* The signal that @f() dies of, or 0. @f has no destructors to run. */
template <class F> int signal_of(F f)
{
	struct sigaction act = {}, bus, segv;
	int signal;

	act.sa_handler = handler;
	::sigaction(SIGBUS, &act, &bus);
	::sigaction(SIGSEGV, &act, &segv);
	signal = sigsetjmp(back, 1);
	if (!signal) {
		armed = true;
		f();
	}
	armed = false;
	::sigaction(SIGBUS, &bus, nullptr);
	::sigaction(SIGSEGV, &segv, nullptr);
	return signal;
}

} // namespace guarded

#endif
