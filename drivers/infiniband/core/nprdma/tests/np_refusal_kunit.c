// SPDX-License-Identifier: GPL-2.0
/*
 * nprdma: unit tests of what is kept of refusals, and of who may see them.
 *
 * A test is a thread of the kernel, so what it refuses is the kernel's, and it may see all.
 */
#include <kunit/test.h>
#include <linux/pid.h>
#include <linux/sched/task.h>
#include <linux/timekeeping.h>
#include <linux/slab.h>
#include <rdma/ib_verbs.h>

#include "../np.h"

/* More than the ring holds */
#define NP_TEST_LOST	5U

/**
 * struct np_refusal_test - two devices without hardware
 * @ibdev: devices
 * @before: number of the newest refusal before the test
 */
struct np_refusal_test {
	struct ib_device *ibdev[2];
	u64 before;
};

static int np_refusal_init_test(struct kunit *test)
{
	struct np_refusal_test *t = kunit_kzalloc(test, sizeof(*t), GFP_KERNEL);
	struct rdma_np_refusal r;
	unsigned int i;

	KUNIT_ASSERT_NOT_NULL(test, t);
	test->priv = t;
	for (i = 0; i < ARRAY_SIZE(t->ibdev); i++) {
		t->ibdev[i] = _ib_alloc_device(sizeof(*t->ibdev[i]));
		KUNIT_ASSERT_NOT_NULL(test, t->ibdev[i]);
		t->ibdev[i]->index = U32_MAX - i;
		snprintf(t->ibdev[i]->name, sizeof(t->ibdev[i]->name), "kunit%u", i);
	}
	np_refuse(t->ibdev[0], "before");
	np_refusal_next(t->ibdev[0], 0, &r);
	while (r.seq) {
		t->before = r.seq;
		np_refusal_next(t->ibdev[0], t->before, &r);
	}
	KUNIT_ASSERT_NE(test, t->before, 0);
	return 0;
}

static void np_refusal_exit_test(struct kunit *test)
{
	struct np_refusal_test *t = test->priv;
	unsigned int i;

	for (i = 0; t && i < ARRAY_SIZE(t->ibdev); i++)
		if (t->ibdev[i])
			ib_dealloc_device(t->ibdev[i]);
}

static void np_refusal_says_who_what_and_when(struct kunit *test)
{
	struct np_refusal_test *t = test->priv;
	u64 begin = ktime_get_boottime_ns();
	struct rdma_np_refusal r;
	struct task_struct *task;
	struct pid *pid;

	np_refuse(t->ibdev[0], "%s of %u", "none", 7);
	np_refusal_next(t->ibdev[0], t->before, &r);
	KUNIT_EXPECT_EQ(test, r.seq, t->before + 1);
	KUNIT_EXPECT_EQ(test, r.flags, RDMA_NP_REFUSAL_ALL);
	KUNIT_EXPECT_EQ(test, r.pid, 0);
	KUNIT_EXPECT_GE(test, r.time, begin);
	KUNIT_EXPECT_LE(test, r.time, ktime_get_boottime_ns());
	KUNIT_EXPECT_STREQ(test, r.command, current->comm);
	KUNIT_EXPECT_STREQ(test, r.device, "kunit0");
	KUNIT_EXPECT_STREQ(test, r.text, "none of 7");
	KUNIT_EXPECT_EQ(test, r.reserved, 0);

	/* A QP that is just being destroyed is nobody's */
	np_refuse_task(NULL, t->ibdev[0], "nobody's");
	np_refusal_next(t->ibdev[0], r.seq, &r);
	KUNIT_EXPECT_EQ(test, r.seq, t->before + 2);
	KUNIT_EXPECT_EQ(test, r.pid, 0);
	KUNIT_EXPECT_STREQ(test, r.command, "");
	KUNIT_EXPECT_STREQ(test, r.text, "nobody's");

	/* A process, in whose PID namespace we are */
	pid = find_get_pid(1);
	task = get_pid_task(pid, PIDTYPE_TGID);
	put_pid(pid);
	KUNIT_ASSERT_NOT_NULL(test, task);
	np_refuse_task(task, t->ibdev[0], "init's");
	put_task_struct(task);
	np_refusal_next(t->ibdev[0], r.seq, &r);
	KUNIT_EXPECT_STREQ(test, r.text, "init's");
	KUNIT_EXPECT_EQ(test, r.pid, 1);
}

static void np_refusals_of_other_devices_are_not_told(struct kunit *test)
{
	struct np_refusal_test *t = test->priv;
	struct rdma_np_refusal r;

	np_refuse(t->ibdev[1], "other");
	np_refusal_next(t->ibdev[0], t->before, &r);
	KUNIT_EXPECT_EQ(test, r.seq, 0);
	np_refuse(t->ibdev[0], "ours");
	np_refusal_next(t->ibdev[0], t->before, &r);
	KUNIT_EXPECT_EQ(test, r.seq, t->before + 2);
	KUNIT_EXPECT_STREQ(test, r.device, "kunit0");
	np_refusal_next(t->ibdev[1], t->before, &r);
	KUNIT_EXPECT_EQ(test, r.seq, t->before + 1);
	KUNIT_EXPECT_STREQ(test, r.device, "kunit1");
}

/* The numbers say how many were lost, and no older one comes instead */
static void np_refusals_overwrite_the_oldest_one(struct kunit *test)
{
	struct np_refusal_test *t = test->priv;
	struct rdma_np_refusal r = {};
	char text[16];
	unsigned int i;
	u64 oldest;

	for (i = 0; i < NP_REFUSALS; i++)
		np_refuse(t->ibdev[0], "refusal %u", i);
	/* That of the beginning was overwritten, and nothing since */
	np_refusal_next(t->ibdev[0], 0, &r);
	KUNIT_EXPECT_EQ(test, r.seq, t->before + 1);
	KUNIT_EXPECT_EQ(test, r.oldest, t->before + 1);

	for (; i < NP_REFUSALS + NP_TEST_LOST; i++)
		np_refuse(t->ibdev[0], "refusal %u", i);
	oldest = t->before + 1 + NP_TEST_LOST;
	np_refusal_next(t->ibdev[0], t->before, &r);
	for (i = 0; i < NP_REFUSALS; i++) {
		KUNIT_ASSERT_EQ(test, r.seq, oldest + i);
		KUNIT_EXPECT_EQ(test, r.oldest, oldest);
		snprintf(text, sizeof(text), "refusal %u", i + NP_TEST_LOST);
		KUNIT_EXPECT_STREQ(test, r.text, text);
		np_refusal_next(t->ibdev[0], r.seq, &r);
	}
	KUNIT_EXPECT_EQ(test, r.seq, 0);
	KUNIT_EXPECT_EQ(test, r.oldest, oldest);
	KUNIT_EXPECT_STREQ(test, r.text, "");
}

static void np_refusals_after_any_number_are_later_ones(struct kunit *test)
{
	struct np_refusal_test *t = test->priv;
	const u64 after[] = { t->before + 1, t->before + 2, S64_MAX, U64_MAX - 1, U64_MAX };
	struct rdma_np_refusal r;
	unsigned int i;

	np_refuse(t->ibdev[0], "one");
	for (i = 0; i < ARRAY_SIZE(after); i++) {
		np_refusal_next(t->ibdev[0], after[i], &r);
		KUNIT_EXPECT_EQ(test, r.seq, 0);
		KUNIT_EXPECT_NE(test, r.oldest, 0);
	}
}

static void np_refusal_that_is_too_long_is_cut(struct kunit *test)
{
	struct np_refusal_test *t = test->priv;
	struct rdma_np_refusal r;
	unsigned int len;
	char *text;

	text = kunit_kzalloc(test, 4 * RDMA_NP_REFUSAL_TEXT, GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, text);
	for (len = 1; len < 4 * RDMA_NP_REFUSAL_TEXT; len++) {
		text[len - 1] = 'a' + len % 26;
		np_refuse(t->ibdev[0], "%s", text);
		np_refusal_next(t->ibdev[0], t->before, &r);
		KUNIT_ASSERT_EQ(test, r.seq, ++t->before);
		KUNIT_ASSERT_EQ(test, strnlen(r.text, sizeof(r.text)),
				min(len, RDMA_NP_REFUSAL_TEXT - 1U));
		KUNIT_EXPECT_EQ(test, strncmp(r.text, text, strlen(r.text)), 0);
		KUNIT_EXPECT_EQ(test, r.reserved, 0);
	}
}

static void np_refusals_of_others_are_seen_by_who_may(struct kunit *test)
{
	struct pid *ours = task_tgid(current), *init = find_get_pid(1);
	struct pid *elsewhere;

	/* In a PID namespace that is not ours, for example of who had the device before */
	elsewhere = kunit_kzalloc(test, struct_size(elsewhere, numbers, 1), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, elsewhere);
	elsewhere->numbers[0].nr = 5;
	KUNIT_ASSERT_NOT_NULL(test, init);
	KUNIT_ASSERT_PTR_NE(test, init, ours);
	KUNIT_EXPECT_TRUE(test, np_refusal_is_visible(ours, false));
	KUNIT_EXPECT_TRUE(test, np_refusal_is_visible(ours, true));
	KUNIT_EXPECT_FALSE(test, np_refusal_is_visible(init, false));
	KUNIT_EXPECT_TRUE(test, np_refusal_is_visible(init, true));
	KUNIT_EXPECT_FALSE(test, np_refusal_is_visible(NULL, false));
	KUNIT_EXPECT_TRUE(test, np_refusal_is_visible(NULL, true));
	KUNIT_EXPECT_FALSE(test, np_refusal_is_visible(elsewhere, false));
	KUNIT_EXPECT_FALSE(test, np_refusal_is_visible(elsewhere, true));
	put_pid(init);
}

static struct kunit_case np_refusal_cases[] = {
	KUNIT_CASE(np_refusal_says_who_what_and_when),
	KUNIT_CASE(np_refusals_of_other_devices_are_not_told),
	KUNIT_CASE(np_refusals_overwrite_the_oldest_one),
	KUNIT_CASE(np_refusals_after_any_number_are_later_ones),
	KUNIT_CASE(np_refusal_that_is_too_long_is_cut),
	KUNIT_CASE(np_refusals_of_others_are_seen_by_who_may),
	{}
};

static struct kunit_suite np_refusal_suite = {
	.name = "nprdma_region_refusal",
	.init = np_refusal_init_test,
	.exit = np_refusal_exit_test,
	.test_cases = np_refusal_cases,
};

kunit_test_suite(np_refusal_suite);
