# SPDX-License-Identifier: GPL-2.0
#
# Entry point: "make help". Everything is built outside the repository, in
# $(BUILD); the work is done by scripts/, each of which has -h.

BUILD := $(abspath $(or $(NPRDMA_BUILD),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/nprdma))
JOBS := $(shell nproc)
TREE ?= $(BUILD)/kernel/git

test-sources = $(sort $(wildcard $(addprefix $(CURDIR)/,tools/testing/selftests/nprdma/*.c userspace/tests/guest/*.c userspace/tests/guest/*.cpp)))
selftests = for x in tools/testing/selftests/nprdma userspace/tests/guest; do \
	make -s -C $$x $(1) O=$(BUILD)/selftests KHDR=$(BUILD)/kernel/src-stock \
		LIBNPRDMA=$(BUILD)/userspace/release || exit; done

export NPRDMA_BUILD := $(BUILD)
export JOBS

# The scripts use all CPUs by themselves; side by side they would only be slow.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: all
all: deps qemu kernel userspace ## build what scripts/vm and the demo need (default)

.PHONY: help
help: ## list the targets
	@echo 'usage: make [NPRDMA_BUILD=DIR] [TARGET]'
	@echo
	@sed -nE 's/^([a-z-]+):.* ## (.*)/  \1\t\2/p' Makefile | expand -t 20
	@echo
	@echo 'Built in $(BUILD).'

.PHONY: demo
demo: all ## page out memory that a peer reads and writes, and show that nothing is lost
	@scripts/demo

.PHONY: check
check: all kernel-stock selftests ## all tests but those of failing allocations, which check-debug has
	@scripts/check

.PHONY: check-debug
check-debug: all kernel-debug selftests ## the kernel tests under KASAN, lockdep, kmemleak, and with failing allocations
	@scripts/check --kernel debug

.PHONY: check-full
check-full: all kernel-stock kernel-debug kernel-kcsan selftests ## all of check, check-debug, a search for data races, the litmus tests, and a short soak with each kernel (hours)
	@scripts/build-herd
	@scripts/check --full

MINUTES ?= 2
SEED ?= $(shell date +%s)

.PHONY: soak
soak: all ## all verbs and all events of memory at random, each at least once, for MINUTES=n with SEED=s
	@scripts/soak $(MINUTES) $(SEED)

.PHONY: mutants
mutants: all selftests ## do the tests notice deliberate bugs? (some hours)
	@tools/testing/mutants/run

.PHONY: litmus
litmus: deps kernel-stock ## the litmus tests of the barriers, with a herd7 that this builds
	@scripts/build-herd
	@scripts/check litmus

.PHONY: bench
bench: all ## the figures: registration, latency, bandwidth, faults
	@scripts/bench

.PHONY: far-figures
far-figures: userspace ## the figures of nprdma-far, over shared memory of this machine
	@scripts/far-figures

.PHONY: sync-figures
sync-figures: userspace ## the figures of nprdma-sync, between threads of this machine
	@mkdir -p $(BUILD)/sync
	@userspace/sync/digits/figures.py $(BUILD)/userspace/release/sync $(BUILD)/sync

.PHONY: alloc-figures
alloc-figures: userspace ## the figures of nprdma-alloc that need no adapter
	@mkdir -p $(BUILD)/alloc
	@$(BUILD)/userspace/release/alloc/bench/alloc_bench.py --json $(BUILD)/alloc/alloc.json

.PHONY: compat
compat: all ## programs of others on unpinned memory, and the tables of them (two hours)
	@scripts/compat

.PHONY: odp-suites
odp-suites: all ## programs that ask for on-demand paging, on unpinned memory that is reclaimed (3 minutes)
	@scripts/compat --odp

.PHONY: deps
deps: ## install the Debian packages that are missing
	@scripts/deps

.PHONY: kernel
kernel: deps ## the guest kernel
	@scripts/build-kernel base

.PHONY: kernel-stock
kernel-stock: deps ## the same kernel without our patches
	@scripts/build-kernel stock

.PHONY: kernel-debug
kernel-debug: deps ## the guest kernel with KASAN, lockdep and kmemleak
	@scripts/build-kernel debug

.PHONY: kernel-kcsan
kernel-kcsan: deps ## the guest kernel that looks for data races
	@scripts/build-kernel kcsan

.PHONY: qemu
qemu: deps ## the emulator with the HCA
	@scripts/build-qemu $(BUILD)

.PHONY: userspace
userspace: deps jemalloc ## libnprdma, the libraries beside it, tools and tests
	@scripts/build-cmake userspace release

.PHONY: jemalloc
jemalloc: deps ## the allocator inside of nprdma-alloc
	@scripts/build-jemalloc >/dev/null

PREFIX ?= /usr/local

.PHONY: install
install: userspace ## the libraries, headers, tools and manual pages, below DESTDIR and PREFIX
	@DESTDIR=$(abspath $(DESTDIR)) cmake --install $(BUILD)/userspace/release --prefix $(abspath $(PREFIX))
	@# Or the new library is not found.
	$(if $(DESTDIR),,ldconfig)

.PHONY: deb
deb: deb-userspace deb-kernel ## Debian packages of user space and of a kernel, in BUILD/deb

.PHONY: deb-userspace
deb-userspace: deps jemalloc ## Debian packages of the libraries, tools and documentation
	@scripts/build-deb

.PHONY: deb-kernel
deb-kernel: deps ## Debian packages of a kernel, configured as the guests' or as the file CONFIG says
	@scripts/build-kernel $(if $(CONFIG),--config $(CONFIG)) deb

.PHONY: selftests
selftests: kernel userspace ## the kselftests and the tests of libnprdma that run in guests
	@# The dependencies name the sources they were built from.
	@[ "$$(cat $(BUILD)/selftests/.from 2>/dev/null)" = '$(test-sources)' ] || rm -rf $(BUILD)/selftests
	@mkdir -p $(BUILD)/selftests && echo '$(test-sources)' >$(BUILD)/selftests/.from
	@($(call selftests,-q)) || scripts/step $(BUILD)/logs/selftests.log "build selftests" -- \
		sh -c '$(call selftests)'

.PHONY: kernel-tree
kernel-tree: deps ## a git work tree of the kernel with the series applied, in TREE
	@scripts/kernel-tree create $(TREE)

.PHONY: patches
patches: ## regenerate the patch series from the work tree in TREE
	@scripts/kernel-tree export $(TREE)

.PHONY: clean
clean: ## remove what was built, keep what was downloaded and unpacked
	rm -rf $(addprefix $(BUILD)/,kernel/base kernel/debug kernel/deb kernel/kcsan kernel/stock qemu userspace hca model \
		selftests soak vm logs)

.PHONY: distclean
distclean: clean ## remove all that this project has put into the build directory
	rm -rf $(addprefix $(BUILD)/,apt bench build-qemu.log .build-qemu.lock deb demo dl herd jemalloc kernel mutants \
		qemu-src qemu_*.orig.tar.*)
	@[ ! -d $(BUILD) ] || rmdir --ignore-fail-on-non-empty $(BUILD)
