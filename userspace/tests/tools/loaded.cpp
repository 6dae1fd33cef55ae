/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Lets a program's environment show that this was loaded. */
#include <cstdlib>

namespace
{

[[gnu::constructor]] void say_so()
{
	setenv("LOADED", "yes", 1);
}

} // namespace
