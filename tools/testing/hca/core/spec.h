/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the wire between driver and HCA looks like: positions of the fields in
 * commands and contexts, queue entry layouts, opcodes and status codes of the
 * mlx5 programming interface, as far as this model uses them. Contexts are
 * big-endian; a field is given by the distance of its first bit from the start
 * and its width in bits, most significant bit first.
 */
#ifndef NPHCA_SPEC_H
#define NPHCA_SPEC_H

#include <cstddef>
#include <cstdint>

namespace nphca {

struct field {
	uint32_t bit;
	uint32_t width;
};

/* Every command */
inline constexpr field cmd_opcode{0x0, 16};
inline constexpr field cmd_op_mod{0x30, 16};
inline constexpr field cmd_object{0x48, 24}; /* in and out: number of the object */
inline constexpr field cmd_function{0x50, 16};
inline constexpr field cmd_out_status{0x0, 8};
inline constexpr field cmd_out_syndrome{0x20, 32};
inline constexpr field cmd_out_eqn{0x58, 8};
inline constexpr field qp_opt_param_mask{0x80, 32};
inline constexpr field resize_select{0x60, 32};
inline constexpr field mkey_pg_access{0x60, 1};

inline constexpr size_t cmd_in_ctx = 16;   /* CQ, EQ, mkey, SRQ context in a command */
inline constexpr size_t cmd_in_qpc = 24;
inline constexpr size_t cmd_in_rmpc = 32;
inline constexpr size_t cmd_in_eq_mask = 88;
inline constexpr size_t cmd_in_pas = 272;

inline constexpr size_t qpc_size = 232, mkc_size = 64, cqc_size = 64, eqc_size = 64, srqc_size = 64,
			rmpc_size = 48 + 192, cap_size = 4096, ads_size = 44;


/* cap: 256 bytes */
inline constexpr field cap_log_max_srq_sz{0x80, 8};
inline constexpr field cap_log_max_qp_sz{0x88, 8};
inline constexpr field cap_log_max_qp{0x9b, 5};
inline constexpr field cap_log_max_srq{0xab, 5};
inline constexpr field cap_log_max_cq_sz{0xc8, 8};
inline constexpr field cap_log_max_cq{0xdb, 5};
inline constexpr field cap_log_max_eq_sz{0xe0, 8};
inline constexpr field cap_log_max_mkey{0xea, 6};
inline constexpr field cap_log_max_eq{0xfc, 4};
inline constexpr field cap_max_indirection{0x100, 8};
inline constexpr field cap_log_max_mrw_sz{0x109, 7};
inline constexpr field cap_fixed_buffer_size{0x108, 1};
inline constexpr field cap_umr_extended_translation_offset{0x118, 1};
inline constexpr field cap_log_max_klm_list_size{0x11a, 6};
inline constexpr field cap_log_max_ra_req_qp{0x14a, 6};
inline constexpr field cap_log_max_ra_res_qp{0x15a, 6};
inline constexpr field cap_gid_table_size{0x170, 16};
inline constexpr field cap_pkey_table_size{0x190, 16};
inline constexpr field cap_ib_virt{0x1a2, 1};
inline constexpr field cap_local_ca_ack_delay{0x1ab, 5};
inline constexpr field cap_port_type{0x1b6, 2};
inline constexpr field cap_num_ports{0x1b8, 8};
inline constexpr field cap_log_max_msg{0x1c3, 5};
inline constexpr field cap_cqe_version{0x1fc, 4};
inline constexpr field cap_compact_address_vector{0x200, 1};
inline constexpr field cap_repeated_block_disabled{0x206, 1};
inline constexpr field cap_umr_modify_entity_size_disabled{0x207, 1};
inline constexpr field cap_umr_modify_atomic_disabled{0x208, 1};
inline constexpr field cap_umr_indirect_mkey_disabled{0x209, 1};
inline constexpr field cap_umr_fence{0x20a, 2};
inline constexpr field cap_roce{0x21d, 1};
inline constexpr field cap_atomic{0x21e, 1};
inline constexpr field cap_cq_oi{0x220, 1};
inline constexpr field cap_cq_resize{0x221, 1};
inline constexpr field cap_cq_moderation{0x222, 1};
inline constexpr field cap_cq_eq_remap{0x226, 1};
inline constexpr field cap_block_lb_mc{0x228, 1};
inline constexpr field cap_imaicl{0x231, 1};
inline constexpr field cap_pkv{0x237, 1};
inline constexpr field cap_qkv{0x236, 1};
inline constexpr field cap_xrc{0x23c, 1};
inline constexpr field cap_ud{0x23d, 1};
inline constexpr field cap_uc{0x23e, 1};
inline constexpr field cap_rc{0x23f, 1};
inline constexpr field cap_log_pg_sz{0x258, 8};
inline constexpr field cap_log_bf_reg_size{0x26b, 5};
inline constexpr field cap_max_wqe_sz_sq{0x290, 16};
inline constexpr field cap_max_wqe_sz_rq{0x2b0, 16};
inline constexpr field cap_max_qp_mcg{0x2e7, 25};
inline constexpr field cap_log_max_mcg{0x318, 8};
inline constexpr field cap_log_max_pd{0x32b, 5};
inline constexpr field cap_log_max_xrcd{0x33b, 5};
inline constexpr field cap_max_num_eqs{0x470, 16};
inline constexpr field cap_device_frequency_khz{0x4e0, 32};
inline constexpr field cap_log_max_rmp{0x383, 5};
inline constexpr field cap_vport_counters{0x181, 1};
inline constexpr field cap_max_qp_cnt{0x186, 10};
inline constexpr field cap_max_sgl_for_optimized_performance{0xc0, 8};
inline constexpr field cap_stat_rate_support{0x1e0, 16};
inline constexpr field cap_log_uar_page_sz{0x490, 16};
inline constexpr field cap_vhca_id{0x30, 16};

/* atomic: 256 bytes */
inline constexpr field atomic_atomic_req_8B_endianness_mode{0x40, 2};
inline constexpr field atomic_supported_atomic_req_8B_endianness_mode_1{0x46, 1};
inline constexpr field atomic_atomic_operations{0x90, 16};
inline constexpr field atomic_atomic_size_qp{0xb0, 16};

/* roce: 256 bytes */
inline constexpr field roce_sw_udp_sport{0x4, 1};
inline constexpr field roce_l3_type{0x8c, 4};
inline constexpr field roce_version{0x98, 8};
inline constexpr field roce_dest_udp_port{0xb0, 16};
inline constexpr field roce_max_src_udp_port{0xc0, 16};
inline constexpr field roce_min_src_udp_port{0xd0, 16};
inline constexpr field roce_address_table_size{0xf0, 16};
enum : uint8_t { ROCE_L3_CAPS = 1 << 1 | 1 << 2, ROCE_VERSION_CAPS = 1 << 0 | 1 << 2, ROCE_V1 = 0, ROCE_V2 = 2, ROCE_IPV4 = 0 };

/* set_roce_address_in: 48 bytes, the address at 16 */
inline constexpr field set_roce_address_in_index{0x40, 16};
inline constexpr size_t roce_address_size = 32;
inline constexpr field roce_addr_vlan_valid{0x83, 1};
inline constexpr field roce_addr_vlan_id{0x84, 12};
inline constexpr field roce_addr_mac{0x90, 48};
inline constexpr field roce_addr_l3_type{0xd4, 4};
inline constexpr field roce_addr_version{0xd8, 8};

/* nic_vport: 256 bytes, in a command that modifies it at 256 */
inline constexpr size_t modify_nic_vport_in_ctx = 256;
inline constexpr field modify_nic_vport_in_roce{0x7e, 1};
inline constexpr field nic_vport_roce_en{0x1f, 1};
inline constexpr field nic_vport_mtu{0x130, 16};
inline constexpr field nic_vport_system_image_guid{0x140, 64};
inline constexpr field nic_vport_port_guid{0x180, 64};
inline constexpr field nic_vport_node_guid{0x1c0, 64};
inline constexpr field nic_vport_permanent_address{0x7b0, 48};
inline constexpr field vport_state_admin{0x78, 4};
inline constexpr field vport_state_state{0x7c, 4};

/* mkc: 64 bytes */
inline constexpr field mkc_free{0x1, 1};
inline constexpr field mkc_access_mode_4_2{0x3, 3};
inline constexpr field mkc_small_fence_on_rdma_read_response{0xf, 1};
inline constexpr field mkc_umr_en{0x10, 1};
inline constexpr field mkc_a{0x11, 1};
inline constexpr field mkc_rw{0x12, 1};
inline constexpr field mkc_rr{0x13, 1};
inline constexpr field mkc_lw{0x14, 1};
inline constexpr field mkc_lr{0x15, 1};
inline constexpr field mkc_access_mode_1_0{0x16, 2};
inline constexpr field mkc_qpn{0x20, 24};
inline constexpr field mkc_mkey_7_0{0x38, 8};
inline constexpr field mkc_length64{0x60, 1};
inline constexpr field mkc_en_rinval{0x67, 1};
inline constexpr field mkc_pd{0x68, 24};
inline constexpr field mkc_start_addr{0x80, 64};
inline constexpr field mkc_len{0xc0, 64};
inline constexpr field mkc_translations_octword_size{0x1a0, 32};
inline constexpr field mkc_log_page_size{0x1da, 6};
inline constexpr field mkc_relaxed_ordering_write{0xd, 1};
inline constexpr field mkc_relaxed_ordering_read{0x1d9, 1};

/* qpc: 232 bytes */
inline constexpr field qpc_state{0x0, 4};
inline constexpr field qpc_st{0x8, 8};
inline constexpr field qpc_pm_state{0x13, 2};
inline constexpr field qpc_pd{0x28, 24};
inline constexpr field qpc_mtu{0x40, 3};
inline constexpr field qpc_log_msg_max{0x43, 5};
inline constexpr field qpc_log_rq_size{0x49, 4};
inline constexpr field qpc_log_rq_stride{0x4d, 3};
inline constexpr field qpc_no_sq{0x50, 1};
inline constexpr field qpc_log_sq_size{0x51, 4};
inline constexpr field qpc_rlky{0x5b, 1};
inline constexpr field qpc_counter_set_id{0x60, 8};
inline constexpr field qpc_uar_page{0x68, 24};
inline constexpr field qpc_user_index{0x88, 24};
inline constexpr field qpc_log_page_size{0xa3, 5};
inline constexpr field qpc_remote_qpn{0xa8, 24};
inline constexpr field qpc_primary_address_path{0xc0, 352};
inline constexpr field qpc_secondary_address_path{0x220, 352};
inline constexpr field qpc_log_ack_req_freq{0x380, 4};
inline constexpr field qpc_log_sra_max{0x388, 3};
inline constexpr field qpc_retry_count{0x38d, 3};
inline constexpr field qpc_rnr_retry{0x390, 3};
inline constexpr field qpc_fre{0x394, 1};
inline constexpr field qpc_cur_rnr_retry{0x395, 3};
inline constexpr field qpc_cur_retry_count{0x398, 3};
inline constexpr field qpc_next_send_psn{0x3c8, 24};
inline constexpr field qpc_cqn_snd{0x3e8, 24};
inline constexpr field qpc_deth_sqpn{0x408, 24};
inline constexpr field qpc_last_acked_psn{0x448, 24};
inline constexpr field qpc_ssn{0x468, 24};
inline constexpr field qpc_log_rra_max{0x488, 3};
inline constexpr field qpc_atomic_mode{0x48c, 4};
inline constexpr field qpc_rre{0x490, 1};
inline constexpr field qpc_rwe{0x491, 1};
inline constexpr field qpc_rae{0x492, 1};
inline constexpr field qpc_page_offset{0x494, 6};
inline constexpr field qpc_min_rnr_nak{0x4a3, 5};
inline constexpr field qpc_next_rcv_psn{0x4a8, 24};
inline constexpr field qpc_xrcd{0x4c8, 24};
inline constexpr field qpc_cqn_rcv{0x4e8, 24};
inline constexpr field qpc_dbr_addr{0x500, 64};
inline constexpr field qpc_q_key{0x540, 32};
inline constexpr field qpc_rq_type{0x565, 3};
inline constexpr field qpc_srqn_rmpn_xrqn{0x568, 24};
inline constexpr field qpc_rmsn{0x588, 24};
inline constexpr field qpc_hw_sq_wqebb_counter{0x5a0, 16};
inline constexpr field qpc_sw_sq_wqebb_counter{0x5b0, 16};
inline constexpr field qpc_hw_rq_counter{0x5c0, 32};
inline constexpr field qpc_sw_rq_counter{0x5e0, 32};
inline constexpr field qpc_cs_req{0x630, 8};
inline constexpr field qpc_cs_res{0x638, 8};

/* ads: 44 bytes */
inline constexpr field ads_pkey_index{0x10, 16};
inline constexpr field ads_grh{0x28, 1};
inline constexpr field ads_mlid{0x29, 7};
inline constexpr field ads_rlid{0x30, 16};
inline constexpr field ads_ack_timeout{0x40, 5};
inline constexpr field ads_src_addr_index{0x48, 8};
inline constexpr field ads_stat_rate{0x54, 4};
inline constexpr field ads_hop_limit{0x58, 8};
inline constexpr field ads_tclass{0x64, 8};
inline constexpr field ads_flow_label{0x6c, 20};
inline constexpr field ads_rgid_rip{0x80, 128};
inline constexpr field ads_udp_sport{0x110, 16};
inline constexpr field ads_eth_prio{0x121, 3};
inline constexpr field ads_sl{0x124, 4};
inline constexpr field ads_vhca_port_num{0x128, 8};
inline constexpr field ads_rmac{0x130, 48};

/* cqc: 64 bytes */
inline constexpr field cqc_status{0x0, 4};
inline constexpr field cqc_cqe_sz{0x8, 3};
inline constexpr field cqc_oi{0xe, 1};
inline constexpr field cqc_st{0x14, 4};
inline constexpr field cqc_page_offset{0x54, 6};
inline constexpr field cqc_log_cq_size{0x63, 5};
inline constexpr field cqc_uar_page{0x68, 24};
inline constexpr field cqc_cq_period{0x84, 12};
inline constexpr field cqc_cq_max_count{0x90, 16};
inline constexpr field cqc_c_eqn_or_apu_element{0xa0, 32};
inline constexpr field cqc_log_page_size{0xc3, 5};
inline constexpr field cqc_last_notified_index{0x108, 24};
inline constexpr field cqc_last_solicit_index{0x128, 24};
inline constexpr field cqc_consumer_counter{0x148, 24};
inline constexpr field cqc_producer_counter{0x168, 24};
inline constexpr field cqc_dbr_addr{0x1c0, 64};

/* eqc: 64 bytes */
inline constexpr field eqc_status{0x0, 4};
inline constexpr field eqc_oi{0xe, 1};
inline constexpr field eqc_st{0x14, 4};
inline constexpr field eqc_page_offset{0x54, 6};
inline constexpr field eqc_log_eq_size{0x63, 5};
inline constexpr field eqc_intr{0xb4, 12};
inline constexpr field eqc_log_page_size{0xc3, 5};
inline constexpr field eqc_consumer_counter{0x148, 24};
inline constexpr field eqc_producer_counter{0x168, 24};

/* srqc: 64 bytes */
inline constexpr field srqc_state{0x0, 4};
inline constexpr field srqc_log_srq_size{0x4, 4};
inline constexpr field srqc_log_rq_stride{0x25, 3};
inline constexpr field srqc_xrcd{0x28, 24};
inline constexpr field srqc_page_offset{0x40, 6};
inline constexpr field srqc_cqn{0x48, 24};
inline constexpr field srqc_log_page_size{0x82, 6};
inline constexpr field srqc_pd{0xc8, 24};
inline constexpr field srqc_lwm{0xe0, 16};
inline constexpr field srqc_wqe_cnt{0xf0, 16};
inline constexpr field srqc_dbr_addr{0x140, 64};

/* xrc_srqc: 64 bytes */
inline constexpr field xrc_srqc_user_index{0x88, 24};

/* rmpc: 240 bytes */
inline constexpr field rmpc_state{0x8, 4};
inline constexpr field rmpc_basic_cyclic_rcv_wqe{0x20, 1};
inline constexpr field rmpc_wq{0x180, 1536};

/* wq: 192 bytes */
inline constexpr field wq_wq_type{0x0, 4};
inline constexpr field wq_page_offset{0x2b, 5};
inline constexpr field wq_lwm{0x30, 16};
inline constexpr field wq_pd{0x48, 24};
inline constexpr field wq_dbr_addr{0x80, 64};
inline constexpr field wq_hw_counter{0xc0, 32};
inline constexpr field wq_sw_counter{0xe0, 32};
inline constexpr field wq_log_wq_stride{0x10c, 4};
inline constexpr field wq_log_wq_pg_sz{0x113, 5};
inline constexpr field wq_log_wq_sz{0x11b, 5};

/* vport: 512 bytes */
inline constexpr field vport_field_select{0x0, 32};
inline constexpr field vport_sm_virt_aware{0x100, 1};
inline constexpr field vport_has_smi{0x101, 1};
inline constexpr field vport_has_raw{0x102, 1};
inline constexpr field vport_grh_required{0x103, 1};
inline constexpr field vport_port_physical_state{0x110, 4};
inline constexpr field vport_vport_state_policy{0x114, 4};
inline constexpr field vport_port_state{0x118, 4};
inline constexpr field vport_vport_state{0x11c, 4};
inline constexpr field vport_system_image_guid{0x140, 64};
inline constexpr field vport_port_guid{0x180, 64};
inline constexpr field vport_node_guid{0x1c0, 64};
inline constexpr field vport_cap_mask1{0x200, 32};
inline constexpr field vport_cap_mask2{0x240, 32};
inline constexpr field vport_lid{0x300, 16};
inline constexpr field vport_lmc{0x318, 3};
inline constexpr field vport_subnet_timeout{0x31b, 5};
inline constexpr field vport_sm_lid{0x320, 16};
inline constexpr field vport_sm_sl{0x330, 4};

/* create_mkey_in: 272 bytes */
inline constexpr field create_mkey_in_translations_octword_actual_size{0x300, 32};

/* query_issi_out: 112 bytes */
inline constexpr field query_issi_out_current_issi{0x50, 16};
inline constexpr field query_issi_out_supported_issi_dw0{0x360, 32};

/* set_issi_in: 16 bytes */
inline constexpr field set_issi_in_current_issi{0x50, 16};

/* arm_rq_in: 16 bytes */
inline constexpr field arm_rq_in_srq_number{0x48, 24};
inline constexpr field arm_rq_in_lwm{0x70, 16};

/* arm_xrc_srq_in: 16 bytes */
inline constexpr field arm_xrc_srq_in_xrc_srqn{0x48, 24};
inline constexpr field arm_xrc_srq_in_lwm{0x70, 16};

/* modify_rmp_in: 272 bytes */
inline constexpr field modify_rmp_in_rmp_state{0x40, 4};
inline constexpr field modify_rmp_in_rmpn{0x48, 24};
inline constexpr field modify_rmp_in_bitmask{0x80, 64};
inline constexpr field modify_rmp_in_ctx{0x100, 1920};

/* ptys: 64 bytes */
inline constexpr field ptys_proto_mask{0x1d, 3};
inline constexpr field ptys_local_port{0x8, 8};
inline constexpr field ptys_ib_link_width_capability{0x80, 16};
inline constexpr field ptys_ib_proto_capability{0x90, 16};
inline constexpr field ptys_ib_link_width_admin{0xe0, 16};
inline constexpr field ptys_ib_proto_admin{0xf0, 16};
inline constexpr field ptys_eth_proto_capability{0x60, 32};
inline constexpr field ptys_eth_proto_admin{0xc0, 32};
inline constexpr field ptys_eth_proto_oper{0x120, 32};
inline constexpr field ptys_ib_link_width_oper{0x140, 16};
inline constexpr field ptys_ib_proto_oper{0x150, 16};
inline constexpr field ptys_an_disable_admin{0x1, 1};

/* pmtu: 16 bytes */
inline constexpr field pmtu_local_port{0x8, 8};
inline constexpr field pmtu_max_mtu{0x20, 16};
inline constexpr field pmtu_admin_mtu{0x40, 16};
inline constexpr field pmtu_oper_mtu{0x60, 16};

/* pvlc: 16 bytes */
inline constexpr field pvlc_local_port{0x8, 8};
inline constexpr field pvlc_vl_hw_cap{0x3c, 4};
inline constexpr field pvlc_vl_admin{0x5c, 4};
inline constexpr field pvlc_vl_operational{0x7c, 4};

/* attach_to_mcg_in: 32 bytes */
inline constexpr field attach_to_mcg_in_qpn{0x48, 24};
inline constexpr field attach_to_mcg_in_multicast_gid{0x80, 128};

/* access_register_in: 16 bytes */
inline constexpr field access_register_in_register_id{0x50, 16};

/* query_special_contexts_out: 32 bytes */
inline constexpr field query_special_contexts_out_dump_fill_mkey{0x40, 32};
inline constexpr field query_special_contexts_out_resd_lkey{0x60, 32};
inline constexpr field query_special_contexts_out_null_mkey{0x80, 32};
inline constexpr field query_special_contexts_out_terminate_scatter_list_mkey{0xa0, 32};

/* query_hca_vport_gid_out: 16 bytes */
inline constexpr field query_hca_vport_gid_out_gids_num{0x60, 16};

/* query_hca_vport_gid_in: 16 bytes */
inline constexpr field query_hca_vport_gid_in_gid_index{0x70, 16};

/* adapter: 256 bytes */
inline constexpr field adapter_vsd_contd_psid{0x780, 128};
inline constexpr field adapter_ieee_vendor_id{0xc8, 24};
inline constexpr field adapter_vsd_vendor_id{0xf0, 16};
inline constexpr field adapter_vsd{0x100, 1664};

enum : uint16_t {
	OP_QUERY_HCA_CAP = 0x100, OP_QUERY_ADAPTER, OP_INIT_HCA, OP_TEARDOWN_HCA, OP_ENABLE_HCA, OP_DISABLE_HCA,
	OP_QUERY_PAGES = 0x107, OP_MANAGE_PAGES, OP_SET_HCA_CAP, OP_QUERY_ISSI, OP_SET_ISSI, OP_SET_DRIVER_VERSION = 0x10d,
	OP_CREATE_MKEY = 0x200, OP_QUERY_MKEY, OP_DESTROY_MKEY, OP_QUERY_SPECIAL_CONTEXTS,
	OP_CREATE_EQ = 0x301, OP_DESTROY_EQ, OP_QUERY_EQ,
	OP_CREATE_CQ = 0x400, OP_DESTROY_CQ, OP_QUERY_CQ, OP_MODIFY_CQ,
	OP_CREATE_QP = 0x500, OP_DESTROY_QP, OP_RST2INIT_QP, OP_INIT2RTR_QP, OP_RTR2RTS_QP, OP_RTS2RTS_QP,
	OP_SQERR2RTS_QP, OP_2ERR_QP, OP_2RST_QP = 0x50a, OP_QUERY_QP, OP_SQD2RTS_QP, OP_MAD_IFC, OP_INIT2INIT_QP,
	OP_CREATE_SRQ = 0x700, OP_DESTROY_SRQ, OP_QUERY_SRQ, OP_ARM_RQ, OP_CREATE_XRC_SRQ = 0x705, OP_DESTROY_XRC_SRQ,
	OP_QUERY_XRC_SRQ, OP_ARM_XRC_SRQ,
	OP_QUERY_VPORT_STATE = 0x750, OP_QUERY_NIC_VPORT_CONTEXT = 0x754, OP_MODIFY_NIC_VPORT_CONTEXT,
	OP_QUERY_ROCE_ADDRESS = 0x760, OP_SET_ROCE_ADDRESS, OP_QUERY_HCA_VPORT_CONTEXT = 0x762, OP_MODIFY_HCA_VPORT_CONTEXT, OP_QUERY_HCA_VPORT_GID, OP_QUERY_HCA_VPORT_PKEY,
	OP_QUERY_VPORT_COUNTER = 0x770, OP_ALLOC_Q_COUNTER, OP_DEALLOC_Q_COUNTER, OP_QUERY_Q_COUNTER,
	OP_ALLOC_PD = 0x800, OP_DEALLOC_PD, OP_ALLOC_UAR, OP_DEALLOC_UAR, OP_CONFIG_INT_MODERATION, OP_ACCESS_REG,
	OP_ATTACH_TO_MCG, OP_DETACH_FROM_MCG, OP_SET_MAD_DEMUX = 0x80c, OP_NOP, OP_ALLOC_XRCD, OP_DEALLOC_XRCD,
	OP_ALLOC_TRANSPORT_DOMAIN = 0x816, OP_DEALLOC_TRANSPORT_DOMAIN,
	OP_CREATE_RMP = 0x90c, OP_MODIFY_RMP, OP_DESTROY_RMP, OP_QUERY_RMP,
};

enum class cmd_status : uint8_t {
	ok = 0, internal = 1, bad_op = 2, bad_param = 3, bad_sys_state = 4, bad_resource = 5, busy = 6, limit = 8,
	bad_res_state = 9, bad_index = 0xa, no_resource = 0xf, bad_qp_state = 0x10, bad_packet = 0x30,
	bad_in_len = 0x50, bad_out_len = 0x51,
};

/* Optional parameters of the QP modify commands */
enum : uint32_t {
	OPT_ALT_PATH = 1u << 0, OPT_RRE = 1u << 1, OPT_RAE = 1u << 2, OPT_RWE = 1u << 3, OPT_PKEY = 1u << 4,
	OPT_QKEY = 1u << 5, OPT_RNR_TIMEOUT = 1u << 6, OPT_PRI_PATH = 1u << 7, OPT_SRA_MAX = 1u << 8, OPT_RRA_MAX = 1u << 9,
	OPT_PM_STATE = 1u << 10, OPT_RETRY = 1u << 12, OPT_RNR_RETRY = 1u << 13, OPT_ACK_TIMEOUT = 1u << 14,
	OPT_PORT = 1u << 16, OPT_SRQN = 1u << 18, OPT_CQN_RCV = 1u << 19, OPT_COUNTER = 1u << 25,
};

enum class qp_state : uint8_t { rst = 0, init = 1, rtr = 2, rts = 3, sqer = 4, sqd = 5, err = 6 };

/* Service types */
enum : uint8_t { ST_RC = 0, ST_UC = 1, ST_UD = 2, ST_XRC = 3, ST_QP0 = 7, ST_QP1 = 8, ST_REG_UMR = 12 };

enum : uint8_t { RQ_REGULAR = 0, RQ_SRQ = 1, RQ_CRQ = 2, RQ_NONE = 3 };

/* Send queue entries */
enum : uint8_t {
	WQE_NOP = 0x00, WQE_SEND_INVAL = 0x01, WQE_WRITE = 0x08, WQE_WRITE_IMM = 0x09, WQE_SEND = 0x0a, WQE_SEND_IMM = 0x0b,
	WQE_READ = 0x10, WQE_CAS = 0x11, WQE_FAA = 0x12, WQE_UMR = 0x25,
};
inline constexpr uint8_t wqe_ce_mask = 0x0c, wqe_ce_always = 0x08, wqe_solicited = 0x02;
inline constexpr uint32_t seg_inline = 0x80000000u, seg_inline_len = 0x3ff, key_terminate = 0x100;
inline constexpr uint32_t av_extended = 0x80000000u, av_grh = 1u << 30;

/* UMR */
enum : uint8_t { UMR_INLINE = 1 << 7, UMR_OFFSET = 1 << 4, UMR_IF_FREE = 1 << 5, UMR_IF_NOT_FREE = 2 << 5 };
enum : uint64_t {
	UMR_MASK_LEN = 1ull << 0, UMR_MASK_PAGE_SIZE = 1ull << 1, UMR_MASK_START = 1ull << 6, UMR_MASK_PD = 1ull << 7,
	UMR_MASK_RINVAL = 1ull << 8, UMR_MASK_KEY = 1ull << 13, UMR_MASK_QPN = 1ull << 14, UMR_MASK_LR = 1ull << 17,
	UMR_MASK_LW = 1ull << 18, UMR_MASK_RR = 1ull << 19, UMR_MASK_RW = 1ull << 20, UMR_MASK_A = 1ull << 21,
	UMR_MASK_FREE = 1ull << 29,
};

/* How an mkey translates */
enum : uint8_t { MKEY_PA = 0, MKEY_MTT = 1, MKEY_KLM = 2, MKEY_KSM = 3 };

/* Completion queue entries */
enum : uint8_t {
	CQE_REQ = 0, CQE_RESP_WRITE_IMM = 1, CQE_RESP_SEND = 2, CQE_RESP_SEND_IMM = 3, CQE_RESP_SEND_INV = 4, CQE_RESIZE = 5,
	CQE_REQ_ERR = 13, CQE_RESP_ERR = 14,
};

enum class wc_error : uint8_t {
	none = 0, local_length = 0x01, local_qp_op = 0x02, local_protection = 0x04, flushed = 0x05, mw_bind = 0x06,
	bad_response = 0x10, local_access = 0x11, remote_invalid = 0x12, remote_access = 0x13, remote_op = 0x14,
	retry = 0x15, rnr_retry = 0x16,
};

/* Events */
enum : uint8_t {
	EV_COMPLETION = 0x00, EV_COMM_EST = 0x02, EV_SQ_DRAINED = 0x03, EV_CQ_ERROR = 0x04, EV_QP_FATAL = 0x05,
	EV_PORT_CHANGE = 0x09, EV_COMMAND = 0x0a, EV_QP_INVALID_REQ = 0x10, EV_QP_ACCESS = 0x11, EV_SRQ_ERROR = 0x12,
	EV_SRQ_LAST_WQE = 0x13, EV_SRQ_LIMIT = 0x14,
};

/* Registers behind ACCESS_REG */
enum : uint16_t {
	REG_PCAP = 0x5001, REG_PMTU = 0x5003, REG_PTYS = 0x5004, REG_PVLC = 0x500f, REG_NODE_DESC = 0x6001, REG_HOST_ENDIAN = 0x7004,
};

/* Offsets in BAR 0 */
inline constexpr uint64_t seg_cmdq_high = 0x10, seg_cmdq_low = 0x14, seg_doorbell = 0x18, seg_initializing = 0x1fc,
			  seg_health = 0x200, seg_health_end = 0x240, seg_timer_high = 0x1000, seg_timer_low = 0x1004,
			  seg_health_counter = 0x1010;
inline constexpr uint32_t first_uar = 32; /* the pages below hold the init segment */
inline constexpr uint32_t uar_cq_arm = 0x20, uar_eq_arm = 0x40, uar_eq_ci = 0x48, uar_sq = 0x800;

/* InfiniBand packet opcodes (base transport header) */
enum : uint8_t {
	BTH_SEND_FIRST = 0x00, BTH_SEND_MIDDLE, BTH_SEND_LAST, BTH_SEND_LAST_IMM, BTH_SEND_ONLY, BTH_SEND_ONLY_IMM,
	BTH_WRITE_FIRST, BTH_WRITE_MIDDLE, BTH_WRITE_LAST, BTH_WRITE_LAST_IMM, BTH_WRITE_ONLY, BTH_WRITE_ONLY_IMM,
	BTH_READ_REQUEST, BTH_READ_FIRST, BTH_READ_MIDDLE, BTH_READ_LAST, BTH_READ_ONLY, BTH_ACK, BTH_ATOMIC_ACK,
	BTH_CAS, BTH_FAA, BTH_SEND_LAST_INV = 0x16, BTH_SEND_ONLY_INV = 0x17,
	BTH_UC = 0x20, BTH_UD = 0x60, BTH_CLASS = 0xe0,
};

/* Syndromes of an acknowledgement */
enum : uint8_t { AETH_ACK = 0x00, AETH_RNR = 0x20, AETH_NAK = 0x60, AETH_TYPE = 0x60, AETH_VALUE = 0x1f };
enum : uint8_t { NAK_SEQUENCE = 0, NAK_INVALID = 1, NAK_ACCESS = 2, NAK_OPERATION = 3 };

} // namespace nphca

#endif
