// SPDX-License-Identifier: GPL-2.0
/*
 * guest-init - process 1 of the guests that scripts/vm starts
 *
 * The guest's root is the host's root file system, mounted read-only over 9p.
 * This program puts the writable and the virtual file systems on it, waits
 * for the emulated HCAs' ports, runs one command, carries its standard
 * streams, and reports its exit status.  It is linked statically so that it
 * depends on nothing but the kernel.
 *
 * Words with the host travel over virtio-serial ports, so that the serial
 * console is the kernel's alone:
 *
 *   vport0p1  control: lines to the host
 *                "up MILLISECONDS"    set up; the command starts
 *                "fail TEXT"          the guest could not be set up
 *                "exit STATUS OUT ERR" the command ended; bytes sent before
 *                "ask TEXT"           a request from $NPRDMA_CTL (see scripts/vm)
 *             and from it: answers to "ask", and "off" once it has all bytes
 *   vport0p2  the command's standard input
 *   vport0p3  its standard output
 *   vport0p4  its standard error
 *
 * A port can be opened once only, hence the command gets pipes (programs do
 * open /dev/stdout again) and this program copies between the two.
 *
 * What to do comes from a file whose path is the first argument: records
 * "key=value", each ended by a NUL byte.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/netlink.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define STATE "/run/nprdma"
#define OUT_DIR STATE "/out"
#define CTL_SOCKET STATE "/ctl"
#define DEVICE_WAIT_MS 20000	/* virtio ports */
#define HCA_WAIT_MS 30000	/* driver bound, port active; mostly it is when we start */
#define MAX_LIST 512

enum { PORT_CTL = 1, PORT_IN, PORT_OUT, PORT_ERR };

struct list {
	char *v[MAX_LIST];
	int n;
};

/* One direction of copying: from a pipe to a port, or the other way round. */
struct stream {
	int from, to;
	char buf[65536];
	size_t off, len;
	unsigned long long total;
};

static struct list args, envs, overlays, keeps, empties;
static const char *cwd = "/";
static int hcas;
static bool want_out, want_swap, want_ethernet;
static int ctl = -1;
static struct stream in, out, err;

static long now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_BOOTTIME, &ts);
	return ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
}

static void power_off(void)
{
	sync();
	reboot(RB_POWER_OFF);
	/* Without ACPI: -no-reboot makes QEMU leave here. */
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}

static void put(int fd, const char *s, size_t n)
{
	while (n) {
		ssize_t r = write(fd, s, n);

		if (r < 0) {
			struct pollfd p = { .fd = fd, .events = POLLOUT };

			if (errno == EAGAIN)
				poll(&p, 1, -1);
			else if (errno != EINTR)
				return;
			continue;
		}
		s += r;
		n -= r;
	}
}

static void __attribute__((format(printf, 1, 2))) tell(const char *fmt, ...)
{
	char line[1024];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(line, sizeof(line) - 1, fmt, ap);
	va_end(ap);
	if (n < 0)
		return;
	if (n > (int)sizeof(line) - 2)
		n = sizeof(line) - 2;
	line[n++] = '\n';
	put(ctl >= 0 ? ctl : STDERR_FILENO, line, n);
}

/* Waits for the host's "off": it has everything, or gave up on us. */
static void __attribute__((noreturn)) leave(void)
{
	char c;

	if (ctl >= 0) {
		fcntl(ctl, F_SETFL, 0);
		while (read(ctl, &c, 1) > 0 && c != '\n')
			;
	}
	power_off();
	_exit(1);
}

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *fmt, ...)
{
	char text[900];
	int e = errno;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	tell("fail %s%s%s", text, e ? ": " : "", e ? strerror(e) : "");
	leave();
}

static void make_dirs(const char *path)
{
	char p[PATH_MAX];

	snprintf(p, sizeof(p), "%s", path);
	for (char *s = p + 1; *s; s++) {
		if (*s != '/')
			continue;
		*s = 0;
		mkdir(p, 0755);
		*s = '/';
	}
	mkdir(p, 0755);
}

static void mount_or_fail(const char *src, const char *dst, const char *type,
			  unsigned long flags, const char *opts)
{
	if (mount(src, dst, type, flags, opts))
		fail("mount %s on %s", type ? type : src, dst);
}

/* For what this kernel may not have (debugfs), or the host's root (a directory). */
static void mount_if_there(const char *type, const char *dst, const char *opts)
{
	if (mount(type, dst, type, 0, opts) && errno != ENOENT && errno != ENODEV)
		fail("mount %s on %s", type, dst);
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	if (write(fd, text, strlen(text)) < 0)
		fprintf(stderr, "guest-init: %s: %s\n", path, strerror(errno));
	close(fd);
}

static ssize_t read_file(const char *path, char *buf, size_t size)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t n = 0;
	ssize_t r = -1;

	if (fd < 0)
		return -1;
	while (n < size - 1 && (r = read(fd, buf + n, size - 1 - n)) > 0)
		n += r;
	close(fd);
	buf[n] = 0;
	return r < 0 ? -1 : (ssize_t)n;
}

static void add(struct list *l, char *s)
{
	if (l->n == MAX_LIST - 1) {
		errno = 0;
		fail("more than %d arguments or variables", MAX_LIST - 1);
	}
	l->v[l->n++] = s;
}

static void read_request(const char *path)
{
	struct stat st;
	char *buf;
	int fd;

	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st))
		fail("open %s", path);
	buf = malloc(st.st_size + 1);
	for (off_t n = 0; n < st.st_size;) {
		ssize_t r = read(fd, buf + n, st.st_size - n);

		if (r <= 0)
			fail("read %s", path);
		n += r;
	}
	buf[st.st_size] = 0;
	close(fd);

	for (char *s = buf; s < buf + st.st_size; s += strlen(s) + 1) {
		char *val = strchr(s, '=');
		size_t n;

		if (!val) {
			errno = 0;
			fail("request record '%s'", s);
		}
		n = val++ - s;
#define KEY(name) (n == strlen(name) && !memcmp(s, name, n))
		if (KEY("arg"))
			add(&args, val);
		else if (KEY("env"))
			add(&envs, val);
		else if (KEY("overlay"))
			add(&overlays, val);
		else if (KEY("keep"))
			add(&keeps, val);
		else if (KEY("empty"))
			add(&empties, val);
		else if (KEY("cwd"))
			cwd = val;
		else if (KEY("hcas"))
			hcas = atoi(val);
		else if (KEY("out"))
			want_out = true;
		else if (KEY("swap"))
			want_swap = true;
		else if (KEY("ethernet"))
			want_ethernet = true;
		else {
			errno = 0;
			fail("request key '%s'", s);
		}
#undef KEY
		s = val;
	}
	if (!args.n) {
		errno = 0;
		fail("no command in %s", path);
	}
}

/*
 * /tmp, /run and the like are empty and new.  The home directories and the
 * repository show what the host has, changes stay in the guest.  Paths of
 * the host that /tmp would hide (a build directory or a clone there) are held
 * by a bind mount until they can be put back.
 */
static void mount_files(void)
{
	char held[64], lower[64], opts[512];

	mount_or_fail("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755");
	make_dirs(STATE "/held");
	make_dirs(STATE "/layer");
	for (int i = 0; i < overlays.n; i++) {
		snprintf(held, sizeof(held), STATE "/held/o%d", i);
		mkdir(held, 0755);
		mount_or_fail(overlays.v[i], held, NULL, MS_BIND, NULL);
	}
	for (int i = 0; i < keeps.n; i++) {
		snprintf(held, sizeof(held), STATE "/held/k%d", i);
		mkdir(held, 0755);
		mount_or_fail(keeps.v[i], held, NULL, MS_BIND, NULL);
	}
	mkdir("/dev/shm", 01777);
	for (int i = 0; i < empties.n; i++)
		mount_if_there("tmpfs", empties.v[i], "mode=1777");
	make_dirs("/run/lock");
	make_dirs("/run/user");

	for (int i = 0; i < overlays.n; i++) {
		snprintf(lower, sizeof(lower), STATE "/held/o%d", i);
		snprintf(held, sizeof(held), STATE "/layer/%d", i);
		mkdir(held, 0755);
		snprintf(opts, sizeof(opts), "%s/up", held);
		mkdir(opts, 0755);
		snprintf(opts, sizeof(opts), "%s/work", held);
		mkdir(opts, 0755);
		snprintf(opts, sizeof(opts),
			 "lowerdir=%s,upperdir=%s/up,workdir=%s/work", lower, held, held);
		make_dirs(overlays.v[i]);
		mount_or_fail("overlay", overlays.v[i], "overlay", 0, opts);
	}
	for (int i = 0; i < keeps.n; i++) {
		snprintf(held, sizeof(held), STATE "/held/k%d", i);
		make_dirs(keeps.v[i]);
		mount_or_fail(held, keeps.v[i], NULL, MS_BIND, NULL);
	}
	if (want_out) {
		make_dirs(OUT_DIR);
		mount_or_fail("nprdma-out", OUT_DIR, "9p", 0,
			      "trans=virtio,version=9p2000.L,msize=512000,cache=none");
	}
}

static void mount_kernel(void)
{
	mount_if_there("proc", "/proc", NULL);
	mount_if_there("sysfs", "/sys", NULL);
	mount_if_there("devtmpfs", "/dev", "mode=755");
	mkdir("/dev/pts", 0755);
	mount_if_there("devpts", "/dev/pts", "mode=620,ptmxmode=666");
	mount_if_there("debugfs", "/sys/kernel/debug", NULL);
	mount_if_there("tracefs", "/sys/kernel/tracing", NULL);
	mount_if_there("cgroup2", "/sys/fs/cgroup", NULL);
	mount_if_there("configfs", "/sys/kernel/config", NULL);
	/* devtmpfs has none of these; udev would make them. */
	if (symlink("/proc/self/fd", "/dev/fd") ||
	    symlink("/proc/self/fd/0", "/dev/stdin") ||
	    symlink("/proc/self/fd/1", "/dev/stdout") ||
	    symlink("/proc/self/fd/2", "/dev/stderr"))
		fprintf(stderr, "guest-init: links in /dev: %s\n", strerror(errno));
}

static int uevent_socket(void)
{
	struct sockaddr_nl sa = { .nl_family = AF_NETLINK, .nl_groups = 1 };
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT);

	if (fd < 0 || bind(fd, (struct sockaddr *)&sa, sizeof(sa)))
		fail("uevent socket");
	return fd;
}

/*
 * virtio_console makes the ports from a work item, so they may come after us.
 * Every one of them is announced by an uevent, which is what is waited for.
 */
static int open_port(int uevents, int nr, int flags)
{
	long end = now_ms() + DEVICE_WAIT_MS;
	char path[32], buf[4096];

	snprintf(path, sizeof(path), "/dev/vport0p%d", nr);
	for (;;) {
		struct pollfd p = { .fd = uevents, .events = POLLIN };
		int fd = open(path, flags | O_NONBLOCK | O_CLOEXEC);
		long left = end - now_ms();

		if (fd >= 0)
			return fd;
		if (errno != ENOENT && errno != ENODEV && errno != ENXIO)
			fail("open %s", path);
		if (left <= 0) {
			errno = ETIMEDOUT;
			fail("wait for %s", path);
		}
		if (poll(&p, 1, left) > 0 && recv(uevents, buf, sizeof(buf), 0) < 0 &&
		    errno != ENOBUFS)
			fail("uevents");
	}
}

static void loopback_up(void)
{
	struct ifreq ifr = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &ifr))
		fail("bring up lo");
	close(fd);
}

/* The host wrote a swap header on the disk that has this serial number. */
static void swap_on(void)
{
	char path[300], serial[64];
	struct dirent *e;
	DIR *d = opendir("/sys/block");

	while (d && (e = readdir(d))) {
		snprintf(path, sizeof(path), "/sys/block/%s/serial", e->d_name);
		if (read_file(path, serial, sizeof(serial)) < 0 ||
		    strncmp(serial, "nprdma-swap", 11))
			continue;
		/* virtio says nothing about it, and swap on what turns is read by place. */
		snprintf(path, sizeof(path), "/sys/block/%s/queue/rotational", e->d_name);
		write_file(path, "0");
		snprintf(path, sizeof(path), "/dev/%s", e->d_name);
		if (swapon(path, 0))
			fail("swapon %s", path);
		closedir(d);
		return;
	}
	errno = ENOENT;
	fail("the swap disk");
}

/* A port of Ethernet is up when its network interface is. */
static void interfaces_up(void)
{
	char *const argv[] = { "tools/testing/guest/interfaces-up", NULL };
	char text[800], more[800];
	int status, p[2];
	size_t n = 0;
	ssize_t r;
	pid_t pid;

	if (pipe2(p, O_CLOEXEC) || (pid = fork()) < 0)
		fail("start %s", argv[0]);
	if (!pid) {
		dup2(p[1], 1);
		dup2(p[1], 2);
		if (!chdir(cwd))
			execve(argv[0], argv, envs.v);
		fprintf(stderr, "%s: %s\n", argv[0], strerror(errno));
		_exit(127);
	}
	close(p[1]);
	/* The first words; the rest only so that it gets on with what it does. */
	while ((r = read(p[0], n ? more : text, sizeof(text) - 1)) > 0)
		n = n ? n : (size_t)r;
	text[n] = 0;
	text[strcspn(text, "\n")] = 0;
	close(p[0]);
	if (waitpid(pid, &status, 0) != pid || status) {
		errno = 0;
		fail("%s: %s", argv[0], text);
	}
}

/*
 * The ports are brought up by their drivers, on work queues, and no event
 * that can be read without opening a verbs context says so.  Hence a look
 * at sysfs every 20 ms, with an end.
 */
static void wait_for_hcas(void)
{
	long end = now_ms() + HCA_WAIT_MS;
	char path[128], state[64];

	for (int i = 0; i < hcas; i++) {
		snprintf(path, sizeof(path), "/sys/class/infiniband/mlx5_%d/ports/1/state", i);
		for (;;) {
			struct timespec tick = { .tv_nsec = 20000000 };

			if (read_file(path, state, sizeof(state)) < 0)
				strcpy(state, "no such device\n");
			if (strstr(state, "ACTIVE"))
				break;
			if (now_ms() > end) {
				state[strcspn(state, "\n")] = 0;
				errno = 0;
				fail("mlx5_%d has no active port after %d s: %s", i,
				     HCA_WAIT_MS / 1000, state);
			}
			nanosleep(&tick, NULL);
		}
	}
}

/*
 * kmemleak reports an object only when it is 5 s old and two scans found it
 * unreferenced, hence the pause.  The report goes to the console, where the
 * host looks for it.
 */
static void report_leaks(void)
{
	static char buf[1 << 20];
	const char *path = "/sys/kernel/debug/kmemleak";
	struct timespec age = { .tv_sec = 6 };

	if (access(path, F_OK))
		return;
	nanosleep(&age, NULL);
	write_file(path, "scan");
	write_file(path, "scan");
	if (read_file(path, buf, sizeof(buf)) > 0 && *buf) {
		fprintf(stderr, "kmemleak: unreferenced objects after the command:\n%s", buf);
		fflush(stderr);
	}
}

static pid_t start(int from_in[2], int to_out[2], int to_err[2])
{
	sigset_t none;
	pid_t pid;

	pid = fork();
	if (pid < 0)
		fail("fork");
	if (pid)
		return pid;

	setsid();
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	dup2(from_in[0], 0);
	dup2(to_out[1], 1);
	dup2(to_err[1], 2);
	if (chdir(cwd)) {
		fprintf(stderr, "vm: chdir %s: %s\n", cwd, strerror(errno));
		_exit(126);
	}
	environ = envs.v;
	execvpe(args.v[0], args.v, envs.v);
	fprintf(stderr, "vm: %s: %s\n", args.v[0], strerror(errno));
	_exit(errno == ENOENT ? 127 : 126);
}

static void new_pipe(int p[2])
{
	if (pipe2(p, O_CLOEXEC))
		fail("pipe");
}

/* Fills an empty buffer; a source that has ended is closed. */
static void stream_read(struct stream *s)
{
	ssize_t r = read(s->from, s->buf, sizeof(s->buf));

	if (r > 0) {
		s->off = 0;
		s->len = r;
	} else if (r == 0 || (errno != EAGAIN && errno != EINTR)) {
		close(s->from);
		s->from = -1;
	}
}

static void stream_write(struct stream *s)
{
	ssize_t r = write(s->to, s->buf + s->off, s->len);

	if (r > 0) {
		s->off += r;
		s->len -= r;
		s->total += r;
	} else if (r < 0 && errno != EAGAIN && errno != EINTR) {
		/* The command closed its input, or the host went away. */
		s->len = 0;
		close(s->from);
		s->from = -1;
	}
}

/* Copies until the command has ended and all that it wrote is with the host. */
static int relay(pid_t child, int sigfd, int listener)
{
	struct signalfd_siginfo info;
	int status = -1, client = -1;
	char line[512];

	for (;;) {
		struct pollfd p[9] = {
			{ .fd = sigfd, .events = POLLIN },
			{ .fd = in.len ? -1 : in.from, .events = POLLIN },
			{ .fd = in.len ? in.to : -1, .events = POLLOUT },
			{ .fd = out.len ? -1 : out.from, .events = POLLIN },
			{ .fd = out.len ? out.to : -1, .events = POLLOUT },
			{ .fd = err.len ? -1 : err.from, .events = POLLIN },
			{ .fd = err.len ? err.to : -1, .events = POLLOUT },
			{ .fd = client < 0 ? listener : client, .events = POLLIN },
			{ .fd = ctl, .events = POLLIN },
		};
		bool quiet = false;
		ssize_t r;
		pid_t pid;
		int st;

		/* After the end, go on only while there is something to copy. */
		if (poll(p, 9, status < 0 ? -1 : 0) == 0)
			quiet = true;

		if (p[0].revents) {
			while (read(sigfd, &info, sizeof(info)) > 0)
				;
			while ((pid = waitpid(-1, &st, WNOHANG)) > 0) {
				if (pid != child)
					continue;
				status = WIFSIGNALED(st) ? 128 + WTERMSIG(st) : WEXITSTATUS(st);
				/* Nobody may write any more, so the rest is finite. */
				kill(-1, SIGKILL);
				while (waitpid(-1, NULL, 0) > 0)
					;
			}
		}
		if (p[1].revents) {
			stream_read(&in);
			if (in.from < 0 && !in.len && in.to >= 0) {
				close(in.to);
				in.to = -1;
			}
		}
		if (p[2].revents) {
			stream_write(&in);
			if (in.from < 0 && !in.len && in.to >= 0) {
				close(in.to);
				in.to = -1;
			}
		}
		if (p[3].revents)
			stream_read(&out);
		if (p[4].revents)
			stream_write(&out);
		if (p[5].revents)
			stream_read(&err);
		if (p[6].revents)
			stream_write(&err);
		if (p[7].revents && client < 0) {
			client = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		} else if (p[7].revents) {
			/* One request per message; it goes to the host as it is. */
			r = recv(client, line, sizeof(line) - 1, 0);
			if (r > 0) {
				line[r] = 0;
				line[strcspn(line, "\n")] = 0;
				tell("ask %s", line);
			} else {
				close(client);
				client = -1;
			}
		}
		if (p[8].revents & POLLIN) {
			r = read(ctl, line, sizeof(line));
			if (r > 0 && client >= 0 && send(client, line, r, MSG_NOSIGNAL) < 0) {
				close(client);
				client = -1;
			}
		}
		if (status >= 0 && (quiet || (out.from < 0 && err.from < 0)) &&
		    !out.len && !err.len)
			return status;
		if (status >= 0 && quiet) {
			/* The host does not take it now: wait for it without spinning. */
			struct pollfd w[2] = {
				{ .fd = out.len ? out.to : -1, .events = POLLOUT },
				{ .fd = err.len ? err.to : -1, .events = POLLOUT },
			};
			poll(w, 2, -1);
		}
	}
}

int main(int argc, char **argv)
{
	struct rlimit nofile = { 65536, 1048576 };
	int to_in[2], to_out[2], to_err[2];
	struct sockaddr_un sa = { .sun_family = AF_UNIX, .sun_path = CTL_SOCKET };
	int uevents, sigfd, listener, status;
	sigset_t chld;
	pid_t child;

	if (getpid() != 1) {
		fprintf(stderr, "guest-init: for process 1 of a guest only, see scripts/vm -h\n");
		return 64;
	}
	if (argc == 2 && !strcmp(argv[1], "probe")) {
		/* scripts/vm only wants to know that a guest gets this far. */
		printf("nprdma-probe-ok\n");
		fflush(stdout);
		power_off();
	}
	signal(SIGPIPE, SIG_IGN);
	mount_kernel();
	uevents = uevent_socket();
	ctl = open_port(uevents, PORT_CTL, O_RDWR);
	if (argc != 2) {
		errno = 0;
		fail("one argument expected, %d given", argc - 1);
	}
	read_request(argv[1]);
	in.from = open_port(uevents, PORT_IN, O_RDONLY);
	out.to = open_port(uevents, PORT_OUT, O_WRONLY);
	err.to = open_port(uevents, PORT_ERR, O_WRONLY);
	close(uevents);

	mount_files();
	if (sethostname("guest", 5) || setrlimit(RLIMIT_NOFILE, &nofile))
		fail("host name and limits");
	loopback_up();
	if (want_swap)
		swap_on();
	if (want_ethernet)
		interfaces_up();
	wait_for_hcas();

	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	sigprocmask(SIG_BLOCK, &chld, NULL);
	sigfd = signalfd(-1, &chld, SFD_NONBLOCK | SFD_CLOEXEC);
	listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (sigfd < 0 || listener < 0 || bind(listener, (struct sockaddr *)&sa, sizeof(sa)) ||
	    listen(listener, 16))
		fail("signals and control socket");

	new_pipe(to_in);
	new_pipe(to_out);
	new_pipe(to_err);
	tell("up %ld", now_ms());
	child = start(to_in, to_out, to_err);
	close(to_in[0]);
	close(to_out[1]);
	close(to_err[1]);
	in.to = to_in[1];
	out.from = to_out[0];
	err.from = to_err[0];
	fcntl(in.to, F_SETFL, O_NONBLOCK);
	fcntl(out.from, F_SETFL, O_NONBLOCK);
	fcntl(err.from, F_SETFL, O_NONBLOCK);

	status = relay(child, sigfd, listener);
	report_leaks();
	tell("exit %d %llu %llu", status, out.total, err.total);
	leave();
}
