// SPDX-License-Identifier: GPL-2.0
/*
 * A program of libfabric that sleeps on the descriptors of its queues, which fi_pingpong does not: fi_trywait(), then poll().
 * Messages go to and fro between two ends of the provider "verbs", each from memory of its own place, and the data is
 * checked.
 *
 *	fi_sleep ADDRESS PORT		the server, which listens there
 *	fi_sleep ADDRESS PORT SERVER	the client, from there
 */
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define ROUNDS 50
#define PLACES 7
#define SIZE 65536
#define SECONDS 30

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_pep *listener;
static struct fid_ep *ep;
static struct fid_eq *eq;
static struct fid_cq *cq;
static unsigned int slept;

static void check(const char *what, ssize_t ret)
{
	if (ret >= 0)
		return;
	fprintf(stderr, "%s: %s\n", what, fi_strerror((int)-ret));
	exit(1);
}

/* Until something is in the queue, or something may be. */
static void wait_for(struct fid *queue)
{
	struct pollfd p = { .events = POLLIN };
	int ret = fi_trywait(fabric, &queue, 1);

	if (ret == -FI_EAGAIN)
		return;
	check("fi_trywait", ret);
	check("fi_control", fi_control(queue, FI_GETWAIT, &p.fd));
	slept++;
	ret = poll(&p, 1, SECONDS * 1000);
	if (ret == 1)
		return;
	fprintf(stderr, "nothing came for %d s\n", SECONDS);
	exit(1);
}

static struct fi_info *event(uint32_t want)
{
	struct fi_eq_cm_entry entry;
	uint32_t got;
	ssize_t ret;

	while ((ret = fi_eq_read(eq, &got, &entry, sizeof(entry), 0)) == -FI_EAGAIN)
		wait_for(&eq->fid);
	check("fi_eq_read", ret);
	if (got != want) {
		fprintf(stderr, "event %u, not %u\n", got, want);
		exit(1);
	}
	return entry.info;
}

static void complete(unsigned int n)
{
	struct fi_cq_entry entry;
	ssize_t ret;

	while (n) {
		ret = fi_cq_read(cq, &entry, 1);
		if (ret == -FI_EAGAIN)
			wait_for(&cq->fid);
		else
			check("fi_cq_read", ret);
		n -= ret == 1;
	}
}

static uint8_t byte(unsigned int round, unsigned int from, size_t i)
{
	return (uint8_t)(round * 37 + from * 101 + i * 7 + (i >> 12));
}

int main(int argc, char **argv)
{
	const int client = argc == 4;
	struct fi_eq_attr eq_attr = { .wait_obj = FI_WAIT_FD };
	struct fi_cq_attr cq_attr = { .wait_obj = FI_WAIT_FD, .format = FI_CQ_FORMAT_CONTEXT, .size = 16 };
	struct fi_info *hints = fi_allocinfo();
	struct fid_mr *mr;
	uint8_t *memory;
	void *key;

	if (argc < 3 || argc > 4 || !hints) {
		fprintf(stderr, "usage: fi_sleep ADDRESS PORT [SERVER]\n");
		return 1;
	}
	hints->ep_attr->type = FI_EP_MSG;
	hints->caps = FI_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
	hints->fabric_attr->prov_name = strdup("verbs");
	hints->addr_format = FI_SOCKADDR_IN;
	if (client) {
		struct fi_info *from;

		check("fi_getinfo", fi_getinfo(FI_VERSION(1, 14), argv[1], NULL, FI_SOURCE, hints, &from));
		hints->src_addr = malloc(from->src_addrlen);
		hints->src_addrlen = from->src_addrlen;
		memcpy(hints->src_addr, from->src_addr, from->src_addrlen);
		fi_freeinfo(from);
	}
	check("fi_getinfo", fi_getinfo(FI_VERSION(1, 14), argv[client ? 3 : 1], argv[2], client ? 0 : FI_SOURCE, hints, &info));
	check("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
	check("fi_eq_open", fi_eq_open(fabric, &eq_attr, &eq, NULL));
	if (!client) {
		check("fi_passive_ep", fi_passive_ep(fabric, info, &listener, NULL));
		check("fi_pep_bind", fi_pep_bind(listener, &eq->fid, 0));
		check("fi_listen", fi_listen(listener));
		info = event(FI_CONNREQ);
	}
	check("fi_domain", fi_domain(fabric, info, &domain, NULL));
	check("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
	check("fi_cq_open", fi_cq_open(domain, &cq_attr, &cq, NULL));
	check("fi_ep_bind", fi_ep_bind(ep, &eq->fid, 0));
	check("fi_ep_bind", fi_ep_bind(ep, &cq->fid, FI_SEND | FI_RECV));
	check("fi_enable", fi_enable(ep));

	memory = mmap(NULL, 2 * PLACES * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED) {
		perror("mmap");
		return 1;
	}
	check("fi_mr_reg", fi_mr_reg(domain, memory, 2 * PLACES * SIZE, FI_SEND | FI_RECV, 0, 0, 0, &mr, NULL));
	key = fi_mr_desc(mr);
	/* The first receive is there before the connection is. */
	check("fi_recv", fi_recv(ep, memory, SIZE, key, 0, NULL));
	if (client)
		check("fi_connect", fi_connect(ep, info->dest_addr, NULL, 0));
	else
		check("fi_accept", fi_accept(ep, NULL, 0));
	event(FI_CONNECTED);

	for (unsigned int n = 0; n < ROUNDS; n++) {
		uint8_t *in = memory + n % PLACES * SIZE, *out = memory + (PLACES + n % PLACES) * SIZE;

		for (size_t i = 0; i < SIZE; i++)
			out[i] = byte(n, (unsigned int)client, i);
		/* The client has begun before the server answers: of its two completions one is of what it sent. */
		if (!client)
			complete(1);
		else
			check("fi_send", fi_send(ep, out, SIZE, key, 0, NULL));
		if (client)
			complete(2);
		for (size_t i = 0; i < SIZE; i++) {
			if (in[i] == byte(n, !client, i))
				continue;
			fprintf(stderr, "round %u: byte %zu is wrong\n", n, i);
			return 1;
		}
		if (n + 1 < ROUNDS)
			check("fi_recv", fi_recv(ep, memory + (n + 1) % PLACES * SIZE, SIZE, key, 0, NULL));
		if (!client) {
			check("fi_send", fi_send(ep, out, SIZE, key, 0, NULL));
			complete(1);
		}
	}
	printf("%d rounds, slept %u times\n", ROUNDS, slept);
	if (client)
		fi_shutdown(ep, 0);
	else
		event(FI_SHUTDOWN);
	fi_close(&ep->fid);
	fi_close(&mr->fid);
	fi_close(&cq->fid);
	/* Who never slept has not shown what this is to show. */
	return !slept;
}
