/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Messages between kernels, forged with raw MADs as a hostile kernel could send them.
 */
#ifndef NP_MESSAGE_H
#define NP_MESSAGE_H

#include <stdint.h>

#include "np_test.h"

/* As np_proto.h of the kernel says. */

enum { RESOLVE = 1, FAULT, RELEASE, FORGET, GONE, RECALL };

#define SIZE		216
#define HEADER		48
#define VERSION		4
#define BODY		(SIZE - HEADER)
#define ANSWER		1
#define LANES		32	/* FAULTs of one QP that may be under way */

struct message {
	uint8_t version;
	uint8_t type;
	uint8_t flags;
	uint8_t status;
	uint16_t length;
	uint16_t ud_pkey;
	uint32_t ud_qpn;
	uint32_t reserved;
	uint32_t src_qpn;
	uint32_t dst_qpn;
	uint64_t incarnation;
	uint64_t tid;
	uint64_t secret;	/* RESOLVE: a nonce */
	union {
		uint8_t body[BODY];
		struct {
			uint64_t region_id;
			uint32_t flags;
			uint16_t lane;
			uint16_t nr_ranges;
			struct {
				uint64_t addr;
				uint64_t length;
			} ranges[8];
		} fault;
		struct {
			uint64_t hold_id;
			uint64_t lease_addr;
			uint64_t lease_length;
			uint32_t nr_words;
			uint32_t reserved;
			uint64_t words[16];
		} faulted;
		struct {
			uint32_t rkey;
			uint32_t reserved;
			uint64_t addr;
		} resolve;
		uint64_t hold_id;
		struct {
			uint64_t region_id;
			uint64_t seq;
		} forget;
	};
};

_Static_assert(sizeof(struct message) == SIZE, "a vendor MAD's data");

#define CLASS		0x3c
#define NOBODYS_CLASS	0x3b

struct port {
	int fd;
	uint32_t agent;
	struct ibv_ah_attr to;
	uint8_t class;		/* of MADs: ours, or another for one that nobody takes */
	uint32_t tid;		/* of MADs */
};

/* From a port of @dev to the one with LID @to. */
int port_open(struct port *port, const char *dev, uint16_t to);
int send_message(struct port *port, const struct message *message);

/*
 * The secret of a pair of QPs, as it is in the header: its owner's kernel gave it to the
 * peer's. Found as the peer's kernel uses it: asks for the page at @addr on QP @qp of @peer,
 * which is connected to the owner's QP @to.
 */
int message_secret(struct np_end *peer, struct ibv_qp *qp, uint32_t to, uint64_t region,
		   uint64_t addr, uint64_t *secret);

/*
 * Who is no kernel, but may set a privileged Q_Key: a UD QP of user space, on a port of
 * @dev, that sends to the port with LID @to.
 */
struct forger {
	struct np_end end;
	struct ibv_qp *qp;
	struct ibv_ah *ah;
	uint32_t qkey;
};

#define QP1_QKEY	0x80010000
#define QUICK_QKEY	0x804e5031

int forger_open(struct forger *forger, const char *dev, uint16_t to, uint32_t qkey);
/* To QP1, as a MAD. */
int forge_mad(struct forger *forger, const struct message *message);
/* As the quick transport does it. */
int forge_quick(struct forger *forger, const struct message *message, uint32_t qpn);

#endif /* NP_MESSAGE_H */
