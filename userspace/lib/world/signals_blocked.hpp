/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* While a thread of the library is started: a thread has the mask of who starts it. */
#ifndef NPR_SIGNALS_BLOCKED_HPP
#define NPR_SIGNALS_BLOCKED_HPP

#include <pthread.h>
#include <signal.h>

namespace npr {

/* Signals are for the application's threads, as it masks them. */
class signals_blocked {
public:
	signals_blocked() noexcept
	{
		sigset_t all;

		sigfillset(&all);
		pthread_sigmask(SIG_SETMASK, &all, &before_);
	}
	signals_blocked(const signals_blocked &) = delete;
	signals_blocked &operator=(const signals_blocked &) = delete;
	~signals_blocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
	sigset_t before_;
};

} // namespace npr

#endif
