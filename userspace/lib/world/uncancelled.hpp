/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a thread that is about to be cancelled has begun in the library, it ends. */
#ifndef NPR_UNCANCELLED_HPP
#define NPR_UNCANCELLED_HPP

#include <pthread.h>

namespace npr {

/*
 * Where it lives there is no point of cancellation, as read(), write(), close() and waiting are:
 * the thread would unwind, and a function that is noexcept on the way would end the process. And
 * verbs have none: who uses them need not expect one.
 */
class uncancelled {
public:
	uncancelled() noexcept { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
	uncancelled(const uncancelled &) = delete;
	uncancelled &operator=(const uncancelled &) = delete;
	~uncancelled() { pthread_setcancelstate(before_, nullptr); }

private:
	int before_ = PTHREAD_CANCEL_ENABLE;
};

} // namespace npr

#endif
