/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#include "world/own_thread.hpp"

#include <array>
#include <cerrno>
#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace npr {

namespace {

/* By system calls: a cpu_set_t has 1024 CPUs, and the kernel refuses it where there may be more. */
struct cpu_mask {
	explicit cpu_mask(pid_t of) noexcept
	    : bytes(syscall(SYS_sched_getaffinity, of, sizeof(words), words.data()))
	{
	}
	[[nodiscard]] bool known() const noexcept { return bytes > 0; }
	[[nodiscard]] bool operator==(const cpu_mask &) const noexcept = default;

	std::array<unsigned long, 256> words{};
	long bytes;
};

struct scheduling {
	explicit scheduling(pid_t of) noexcept : cpus(of)
	{
		policy = sched_getscheduler(of);
		/* Those that a thread can be given by sched_setscheduler(). With SCHED_RESET_ON_FORK no thread inherits its own. */
		if (policy == SCHED_FIFO || policy == SCHED_RR)
			(void)sched_getparam(of, &priority);
		else if (policy != SCHED_BATCH && policy != SCHED_IDLE)
			policy = SCHED_OTHER;
		errno = 0;
		nice = getpriority(PRIO_PROCESS, static_cast<id_t>(of));
		if (nice == -1 && errno)
			nice = 0;
	}

	cpu_mask cpus;
	int policy, nice;
	sched_param priority{};
};

/* When the library is loaded: before main(), if the program is linked with it, or it is preloaded. */
const scheduling first_thread(getpid());

} // namespace

void become_own_thread(const char *name) noexcept
{
	const scheduling mine(0);

	/* A device is opened by a constructor that ran before ours. */
	if (!first_thread.cpus.bytes)
		return (void)pthread_setname_np(pthread_self(), name);
	/* Only what differs: the kernel remembers a mask that was asked for when it changes those of a cpuset. */
	if (first_thread.cpus.known() && mine.cpus != first_thread.cpus)
		(void)syscall(SYS_sched_setaffinity, 0, first_thread.cpus.bytes, first_thread.cpus.words.data());
	if (mine.policy != first_thread.policy || mine.priority.sched_priority != first_thread.priority.sched_priority)
		(void)sched_setscheduler(0, first_thread.policy, &first_thread.priority);
	if (mine.nice != first_thread.nice)
		(void)setpriority(PRIO_PROCESS, 0, first_thread.nice);
	(void)pthread_setname_np(pthread_self(), name);
}

} // namespace npr
