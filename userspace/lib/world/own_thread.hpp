/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A thread of the library belongs to the process, and not to the thread of the application that happened to start it.
 * That one may be bound to a core, where ours would be in its way; it may run under a real-time policy, under which ours would keep
 * others from running; or its nice value may be so high that ours would hardly run, while peers wait for memory.
 */
#ifndef NPR_OWN_THREAD_HPP
#define NPR_OWN_THREAD_HPP

namespace npr {

/*
 * For a thread that the library has just started: it gets the CPUs, the scheduling policy and the nice value that the
 * first thread of the process had when the library was loaded, and then @name (15 characters at most). What the
 * process has no right to, a lower nice value for example, stays as it was inherited.
 */
void become_own_thread(const char *name) noexcept;

} // namespace npr

#endif
