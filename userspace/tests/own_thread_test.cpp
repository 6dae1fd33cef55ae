/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Where and how the library's threads run, whoever started them. */
#include "objects_fixture.hpp"

#include "world/own_thread.hpp"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sched.h>
#include <string>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

using namespace npr::fake;
using namespace std::chrono_literals;

namespace {

struct placement {
	explicit placement(pid_t of) : policy(sched_getscheduler(of)), nice(getpriority(PRIO_PROCESS, static_cast<id_t>(of)))
	{
		EXPECT_EQ(sched_getaffinity(of, sizeof(cpus), &cpus), 0);
	}
	[[nodiscard]] bool operator==(const placement &o) const
	{
		return policy == o.policy && nice == o.nice && CPU_EQUAL(&cpus, &o.cpus);
	}

	int policy, nice;
	cpu_set_t cpus;
};

std::ostream &operator<<(std::ostream &out, const placement &p)
{
	return out << CPU_COUNT(&p.cpus) << " CPUs, policy " << p.policy << ", nice " << p.nice;
}

/* In a thread of the application that is unlike the process in all of that, as far as the process may undo it. */
template <class F> void elsewhere(F &&f)
{
	std::thread([&] {
		const placement whole(getpid());
		cpu_set_t one;

		CPU_ZERO(&one);
		for (unsigned i = 0; i < CPU_SETSIZE; ++i)
			if (CPU_ISSET(i, &whole.cpus)) {
				CPU_SET(i, &one);
				break;
			}
		const sched_param none{};
		ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
		ASSERT_EQ(sched_setscheduler(0, SCHED_BATCH, &none), 0);
		rlimit may{};
		getrlimit(RLIMIT_NICE, &may);
		if (!geteuid() || may.rlim_cur >= static_cast<rlim_t>(20 - whole.nice)) {
			ASSERT_EQ(setpriority(PRIO_PROCESS, 0, whole.nice + 3), 0);
		}
		ASSERT_FALSE(placement(0) == whole);
		f();
	}).join();
}

/* Of the threads with this name; false: there is none for a long time. */
template <class F> bool all_named(const std::string &name, F &&f)
{
	for (const auto begun = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - begun < 10s;) {
		bool any = false;

		for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
			std::ifstream comm(task.path() / "comm");
			std::string word;
			if (!(comm >> word) || word != name)
				continue;
			f(static_cast<pid_t>(std::stol(task.path().filename())));
			any = true;
		}
		if (any)
			return true;
		std::this_thread::sleep_for(1ms);
	}
	return false;
}

TEST(OwnThread, IsOfTheProcessAndNotOfWhoStartsIt)
{
	elsewhere([] {
		std::thread([] {
			EXPECT_FALSE(placement(0) == placement(getpid()));
			npr::become_own_thread("some-name");
			EXPECT_EQ(placement(0), placement(getpid()));
			char name[16];
			EXPECT_EQ(pthread_getname_np(pthread_self(), name, sizeof(name)), 0);
			EXPECT_STREQ(name, "some-name");
		}).join();
	});
}

struct idler final : npr::lease_keeper::client {
	void tend(bool) noexcept override {}
};

TEST(OwnThread, TheKeeperIsOne)
{
	npr::lease_keeper keeper;
	idler c;

	elsewhere([&] { keeper.add(c, -1); });
	EXPECT_TRUE(all_named("nprdma-keeper", [](pid_t t) { EXPECT_EQ(placement(t), placement(getpid())); }));
	keeper.remove(c);
}

using OwnThreads = Objects;

TEST_F(OwnThreads, TheResolversAreSome)
{
	elsewhere([&] { attach(1); });
	EXPECT_TRUE(all_named("nprdma-resolver", [](pid_t t) { EXPECT_EQ(placement(t), placement(getpid())); }));
}

} // namespace
