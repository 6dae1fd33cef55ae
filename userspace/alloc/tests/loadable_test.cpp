/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * "loadable_test PLUGIN": can a program that runs load a plug-in with the library, and use it in the thread that loads it,
 * in one that was there before, and in one that comes later? Thread-local storage decides.
 */
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <thread>

int main(int argc, char **argv)
{
	std::atomic<bool (*)()> use = nullptr;
	std::atomic<int> good = 0;

	if (argc != 2)
		return 64;
	std::thread before([&] {
		use.wait(nullptr);
		good += use.load()();
	});
	void *const plugin = dlopen(argv[1], RTLD_NOW);
	if (!plugin) {
		std::fprintf(stderr, "%s\n", dlerror());
		std::_Exit(1);
	}
	use = reinterpret_cast<bool (*)()>(dlsym(plugin, "use_an_arena"));
	if (!use) {
		std::fprintf(stderr, "%s\n", dlerror());
		std::_Exit(1);
	}
	use.notify_all();
	good += use.load()();
	std::thread([&] { good += use.load()(); }).join();
	before.join();
	return good != 3;
}
