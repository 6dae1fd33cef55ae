/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * For sources written for UMap: its names, over nprdma-far. A page that cannot be brought is SIGBUS.
 *
 * From the environment: UMAP_PAGESIZE (bytes), UMAP_BUFSIZE (pages, less than 8 count as 8), UMAP_PAGE_FILLERS, UMAP_PAGE_EVICTORS,
 * UMAP_EVICT_HIGH_WATER_THRESHOLD and UMAP_EVICT_LOW_WATER_THRESHOLD (per cent), UMAP_READ_AHEAD (pages).
 * UMAP_MAX_FAULT_EVENTS, UMAP_MONITOR_FREQ and UMAP_LOG_LEVEL are accepted and have no effect.
 */
#ifndef NPRDMA_FAR_UMAP_H
#define NPRDMA_FAR_UMAP_H

#ifdef __cplusplus
#include <cstdint>
#include <umap/store/Store.hpp>
#include <umap/store/StoreNetwork.h>
#else
#include <stdint.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#define UMAP_PRIVATE MAP_PRIVATE
#define UMAP_FIXED MAP_FIXED
#define UMAP_FAILED ((void *)-1)

#pragma GCC visibility push(default)
#ifdef __cplusplus
namespace Umap
{
/* @offset in the store or file. @store stays the caller's. UMAP_FAILED: errno says why. */
void *umap_ex(void *addr, std::size_t length, int prot, int flags, int fd, off_t offset, Store *store);
} // namespace Umap

extern "C" {
#endif

struct umap_prefetch_item {
	void *page_base_addr;
};

void *umap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
/* All of a mapping, or whole pages of it. -1: it could not be written back, and stays. */
int uunmap(void *addr, size_t length);
int umap_flush(void);
/* Writes back, and gives the memory back. */
int umap_evict(void);
/*
 * With @memory: lends it by the name @id, until uunmap(@memory), which waits for the clients; @memory is
 * returned. With NULL: maps what servers lend by that name, @bytes of it or all if that is 0, to be read. See
 * umap/store/StoreNetwork.h.
 */
void *umap_network(const char *id, void *memory, size_t bytes);
int umap_has_write_support(void);
void umap_prefetch(int npages, struct umap_prefetch_item *page_array);
void umap_fetch_and_pin(char *paddr, uint64_t size);

/* What is set counts if nothing was mapped yet; the size of the buffer always. */
long umapcfg_get_system_page_size(void);
uint64_t umapcfg_get_max_pages_in_buffer(void);
void umapcfg_set_max_pages_in_buffer(uint64_t max_pages);
uint64_t umapcfg_get_umap_page_size(void);
void umapcfg_set_umap_page_size(uint64_t page_size);
uint64_t umapcfg_get_num_fillers(void);
void umapcfg_set_num_fillers(uint64_t num_fillers);
uint64_t umapcfg_get_num_flushers(void);
void umapcfg_set_num_flushers(uint64_t num_flushers);
uint64_t umapcfg_get_num_evictors(void);
void umapcfg_set_num_evictors(uint64_t num_evictors);
uint64_t umapcfg_get_max_fault_events(void);
void umapcfg_set_max_fault_events(uint64_t max_events);
uint64_t umapcfg_get_read_ahead(void);
int umapcfg_get_evict_low_water_threshold(void);
int umapcfg_get_evict_high_water_threshold(void);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop

#endif
