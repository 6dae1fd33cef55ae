/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * An application uses verbs until the very end: a global's destructor, which runs after those of all
 * that came later, posts, polls and gives its region back.
 */
#include "fake_verbs.hpp"

#include <array>
#include <cstdio>
#include <cstdlib>

namespace {

struct application {
	~application()
	{
		ibv_sge s{reinterpret_cast<std::uintptr_t>(memory.data()), sizeof(memory), mr->lkey};
		ibv_send_wr wr{}, *bad;
		ibv_wc wc{};

		wr.wr_id = 4;
		wr.sg_list = &s;
		wr.num_sge = 1;
		wr.opcode = IBV_WR_SEND;
		wr.send_flags = IBV_SEND_SIGNALED;
		if (ibv_post_send(qp, &wr, &bad) || !fake::is_held(fake::of(qp).lkey) ||
		    ibv_poll_cq(cq, 1, &wc) != 1 || wc.wr_id != 4 || ibv_dereg_mr(mr) || ibv_destroy_qp(qp) ||
		    ibv_destroy_cq(cq) || ibv_close_device(pd.context)) {
			std::fprintf(stderr, "verbs have ended before the program\n");
			std::_Exit(1);
		}
	}

	void begin()
	{
		pd.context = ibv_open_device(&fake_device);
		cq = ibv_create_cq(pd.context, 64, nullptr, nullptr, 0);
		mr = ibv_reg_mr(&pd, memory.data(), sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
		ibv_qp_init_attr attr{};
		attr.send_cq = attr.recv_cq = cq;
		attr.qp_type = IBV_QPT_RC;
		attr.cap = {4, 4, 4, 4, 64};
		qp = ibv_create_qp(&pd, &attr);
	}

	ibv_pd pd{};
	ibv_cq *cq = nullptr;
	ibv_qp *qp = nullptr;
	ibv_mr *mr = nullptr;
	std::array<std::byte, 64> memory{};
};

application global;

} // namespace

int main()
{
	global.begin();
	return 0;
}
