/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* npctl: what the kernel, PCI and the log say, also if they lie. */
#include "host.hpp"
#include "json.hpp"
#include "methods.hpp"
#include "nldev.hpp"

#include <gtest/gtest.h>

#include <linux/netlink.h>
#include <linux/pci_regs.h>
#include <rdma/rdma_netlink.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <system_error>
#include <vector>

namespace
{

using namespace npr::ctl;
namespace fs = std::filesystem;

/* Attributes, one behind the other. */
class attributes
{
public:
	attributes &put(int type, const void *content, std::size_t size)
	{
		const nlattr head = {.nla_len = static_cast<std::uint16_t>(NLA_HDRLEN + size),
				     .nla_type = static_cast<std::uint16_t>(type)};

		add(&head, sizeof(head));
		add(content, size);
		all_.resize(NLA_ALIGN(all_.size()));
		return *this;
	}
	attributes &u8(int type, std::uint8_t n) { return put(type, &n, sizeof(n)); }
	attributes &u32(int type, std::uint32_t n) { return put(type, &n, sizeof(n)); }
	attributes &u64(int type, std::uint64_t n) { return put(type, &n, sizeof(n)); }
	attributes &text(int type, const std::string &s) { return put(type, s.c_str(), s.size() + 1); }
	attributes &nest(int type, const attributes &inner)
	{
		return put(type | NLA_F_NESTED, inner.all_.data(), inner.all_.size());
	}
	/* Driver attributes come with how to print them. */
	attributes &driver(const std::string &name, std::uint64_t n)
	{
		return text(RDMA_NLDEV_ATTR_DRIVER_STRING, name).u64(RDMA_NLDEV_ATTR_DRIVER_U64, n);
	}
	attributes &driver(const std::string &name, const std::string &value)
	{
		return text(RDMA_NLDEV_ATTR_DRIVER_STRING, name).text(RDMA_NLDEV_ATTR_DRIVER_STRING, value);
	}
	[[nodiscard]] bytes get() const { return all_; }
	[[nodiscard]] const std::vector<std::byte> &vector() const { return all_; }

private:
	void add(const void *p, std::size_t size)
	{
		const auto *const b = static_cast<const std::byte *>(p);

		all_.insert(all_.end(), b, b + size);
	}
	std::vector<std::byte> all_;
};

attributes region_attributes(std::uint32_t number)
{
	attributes driver;

	driver.driver("memory", "unpinned")
	    .driver("region", 77)
	    .driver("resident", 5)
	    .driver("writable", 3)
	    .driver("held", 2)
	    .driver("leased", 1)
	    .driver("huge", 0);
	return attributes()
	    .u64(RDMA_NLDEV_ATTR_RES_MRLEN, 1 << 20)
	    .u32(RDMA_NLDEV_ATTR_RES_MRN, number)
	    .u32(RDMA_NLDEV_ATTR_RES_PDN, 9)
	    .u32(RDMA_NLDEV_ATTR_RES_PID, 1234)
	    .nest(RDMA_NLDEV_ATTR_DRIVER, driver);
}

attributes mr_message(const std::vector<attributes> &entries)
{
	attributes table;

	for (const attributes &e : entries)
		table.nest(RDMA_NLDEV_ATTR_RES_MR_ENTRY, e);
	return attributes()
	    .u32(RDMA_NLDEV_ATTR_DEV_INDEX, 0)
	    .text(RDMA_NLDEV_ATTR_DEV_NAME, "mlx5_0")
	    .nest(RDMA_NLDEV_ATTR_RES_MR, table);
}

attributes counter_message(std::uint32_t number)
{
	auto counter = [](const std::string &name, std::uint64_t n) {
		return attributes()
		    .text(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME, name)
		    .u64(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE, n);
	};
	attributes counters;

	counters.nest(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY, counter("faults_minor", 11))
	    .nest(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY, counter("faults_major", 4));
	return mr_message({attributes()
			       .u32(RDMA_NLDEV_ATTR_RES_MRN, number)
			       .nest(RDMA_NLDEV_ATTR_STAT_HWCOUNTERS, counters)});
}

attributes qp_message()
{
	return attributes().nest(
	    RDMA_NLDEV_ATTR_RES_QP,
	    attributes().nest(RDMA_NLDEV_ATTR_RES_QP_ENTRY, attributes()
								.u32(RDMA_NLDEV_ATTR_PORT_INDEX, 1)
								.u32(RDMA_NLDEV_ATTR_RES_LQPN, 200)
								.u32(RDMA_NLDEV_ATTR_RES_PDN, 9)
								.u32(RDMA_NLDEV_ATTR_RES_PID, 1234)
								.u32(RDMA_NLDEV_ATTR_RES_RQPN, 300)
								.u8(RDMA_NLDEV_ATTR_RES_TYPE, 2)
								.u8(RDMA_NLDEV_ATTR_RES_STATE, 3)));
}

TEST(Nldev, ARegionIsRead)
{
	std::map<std::uint32_t, region> all;

	read_regions(mr_message({region_attributes(6)}).get(), all);
	ASSERT_EQ(all.size(), 1u);
	const region &r = all.at(6);
	EXPECT_EQ(r.id, 77u);
	EXPECT_EQ(r.length, 1u << 20);
	EXPECT_EQ(r.pd, 9u);
	EXPECT_EQ(r.whose.pid, 1234u);
	EXPECT_EQ(r.whose.kernel, "");
	EXPECT_EQ(r.resident, 5u);
	EXPECT_EQ(r.writable, 3u);
	EXPECT_EQ(r.held, 2u);
	EXPECT_EQ(r.leased, 1u);
	read_counters(counter_message(6).get(), all);
	EXPECT_EQ(all.at(6).count("faults_minor"), 11u);
	EXPECT_EQ(all.at(6).count("faults_major"), 4u);
	EXPECT_EQ(all.at(6).count("none"), 0u);
}

TEST(Nldev, PinnedMemoryIsNoRegion)
{
	std::map<std::uint32_t, region> all;
	attributes other;

	other.driver("memory", "pinned").driver("resident", 5).driver("unpinned", "memory");
	read_regions(
	    mr_message({attributes().u32(RDMA_NLDEV_ATTR_RES_MRN, 1),
			attributes().u32(RDMA_NLDEV_ATTR_RES_MRN, 2).nest(RDMA_NLDEV_ATTR_DRIVER, other)})
		.get(),
	    all);
	EXPECT_TRUE(all.empty());
}

TEST(Nldev, ARegionThatComesTwiceIsOne)
{
	std::map<std::uint32_t, region> all;

	read_regions(mr_message({region_attributes(6), region_attributes(7), region_attributes(6)}).get(),
		     all);
	EXPECT_EQ(all.size(), 2u);
}

TEST(Nldev, CountersOfWhatIsNotThereAreNothing)
{
	std::map<std::uint32_t, region> all;

	read_regions(mr_message({region_attributes(6)}).get(), all);
	read_counters(counter_message(7).get(), all);
	EXPECT_EQ(all.size(), 1u);
	EXPECT_TRUE(all.at(6).counters.empty());
}

TEST(Nldev, NumbersOfAnotherSizeSayNothing)
{
	std::map<std::uint32_t, region> all;

	read_regions(
	    mr_message({attributes()
			    .u64(RDMA_NLDEV_ATTR_RES_MRN, 6)
			    .nest(RDMA_NLDEV_ATTR_DRIVER, attributes().driver("memory", "unpinned"))})
		.get(),
	    all);
	EXPECT_TRUE(all.empty());
	read_regions(
	    mr_message({attributes()
			    .u32(RDMA_NLDEV_ATTR_RES_MRN, 6)
			    .u32(RDMA_NLDEV_ATTR_RES_MRLEN, 4096)
			    .nest(RDMA_NLDEV_ATTR_DRIVER,
				  attributes().driver("memory", "unpinned").driver("resident", "five"))})
		.get(),
	    all);
	ASSERT_EQ(all.size(), 1u);
	EXPECT_EQ(all.at(6).length, 0u);
	EXPECT_EQ(all.at(6).resident, 0u);
}

TEST(Nldev, HowToPrintADriverAttributeIsPassedOver)
{
	std::map<std::uint32_t, region> all;
	attributes driver;

	driver.text(RDMA_NLDEV_ATTR_DRIVER_STRING, "memory")
	    .u8(RDMA_NLDEV_ATTR_DRIVER_PRINT_TYPE, 1)
	    .text(RDMA_NLDEV_ATTR_DRIVER_STRING, "unpinned")
	    .text(RDMA_NLDEV_ATTR_DRIVER_STRING, "leased")
	    .u8(RDMA_NLDEV_ATTR_DRIVER_PRINT_TYPE, 1)
	    .u64(RDMA_NLDEV_ATTR_DRIVER_U64, 4);
	read_regions(
	    mr_message({attributes().u32(RDMA_NLDEV_ATTR_RES_MRN, 1).nest(RDMA_NLDEV_ATTR_DRIVER, driver)})
		.get(),
	    all);
	ASSERT_EQ(all.size(), 1u);
	EXPECT_EQ(all.at(1).leased, 4u);
}

TEST(Nldev, AQueuePairIsRead)
{
	queue_pairs all;

	read_queue_pairs(qp_message().get(), all);
	ASSERT_EQ(all.size(), 1u);
	const queue_pair &q = all.at({200, 1});
	EXPECT_EQ(q.remote, 300u);
	EXPECT_EQ(q.pd, 9u);
	EXPECT_EQ(q.type, 2);
	EXPECT_EQ(q.state, 3);
	EXPECT_EQ(q.whose.pid, 1234u);
}

TEST(Nldev, EachPortHasItsOwnQueuePairOfANumber)
{
	queue_pairs all;
	attributes table;

	for (const std::uint32_t port : {1u, 2u})
		table.nest(RDMA_NLDEV_ATTR_RES_QP_ENTRY, attributes()
							     .u32(RDMA_NLDEV_ATTR_PORT_INDEX, port)
							     .u32(RDMA_NLDEV_ATTR_RES_LQPN, 1)
							     .text(RDMA_NLDEV_ATTR_RES_KERN_NAME, "ib_core"));
	read_queue_pairs(attributes().nest(RDMA_NLDEV_ATTR_RES_QP, table).get(), all);
	EXPECT_EQ(all.size(), 2u);
}

TEST(Nldev, ADeviceIsRead)
{
	std::vector<device> all;

	read_device(attributes()
			.u32(RDMA_NLDEV_ATTR_DEV_INDEX, 3)
			.text(RDMA_NLDEV_ATTR_DEV_NAME, "mlx5_3")
			.u32(RDMA_NLDEV_ATTR_PORT_INDEX, 2)
			.text(RDMA_NLDEV_ATTR_FW_VERSION, "16.35")
			.text(RDMA_NLDEV_ATTR_DEV_PROTOCOL, "ib")
			.get(),
		    all);
	ASSERT_EQ(all.size(), 1u);
	EXPECT_EQ(all[0].index, 3u);
	EXPECT_EQ(all[0].name, "mlx5_3");
	EXPECT_EQ(all[0].ports, 2u);
	EXPECT_EQ(all[0].firmware, "16.35");
	EXPECT_EQ(all[0].protocol, "ib");
}

TEST(Nldev, ADeviceWithoutAUsableNameIsNone)
{
	std::vector<device> all;

	for (const char *name : {"", ".", "..", "../../etc", "a/b"})
		read_device(
		    attributes().u32(RDMA_NLDEV_ATTR_DEV_INDEX, 3).text(RDMA_NLDEV_ATTR_DEV_NAME, name).get(),
		    all);
	read_device(attributes().text(RDMA_NLDEV_ATTR_DEV_NAME, "mlx5_0").get(), all);
	read_device(attributes().u8(RDMA_NLDEV_ATTR_DEV_INDEX, 1).text(RDMA_NLDEV_ATTR_DEV_NAME, "x").get(),
		    all);
	EXPECT_TRUE(all.empty());
}

TEST(Nldev, TextWithoutAnEndEndsWithItsAttribute)
{
	std::vector<device> all;

	read_device(
	    attributes().u32(RDMA_NLDEV_ATTR_DEV_INDEX, 3).put(RDMA_NLDEV_ATTR_DEV_NAME, "mlx5", 4).get(),
	    all);
	ASSERT_EQ(all.size(), 1u);
	EXPECT_EQ(all[0].name, "mlx5");
}

/* In memory of their own, so that a sanitizer finds what reads beyond. */
void read_all(const std::vector<std::byte> &message)
{
	std::vector<device> devices;
	std::map<std::uint32_t, region> regions;
	queue_pairs qps;

	read_device(message, devices);
	read_regions(message, regions);
	regions[6];
	read_counters(message, regions);
	read_queue_pairs(message, qps);
}

std::vector<std::vector<std::byte>> good_messages()
{
	return {
	    mr_message({region_attributes(6), region_attributes(7)}).vector(), counter_message(6).vector(),
	    qp_message().vector(),
	    attributes().u32(RDMA_NLDEV_ATTR_DEV_INDEX, 0).text(RDMA_NLDEV_ATTR_DEV_NAME, "mlx5_0").vector()};
}

TEST(HostileNldev, PrefixesOfMessagesAddNothingBroken)
{
	const auto good = mr_message({region_attributes(6)}).vector();

	for (std::size_t n = 0; n < good.size(); n++) {
		const std::vector<std::byte> part(good.begin(),
						  good.begin() + static_cast<std::ptrdiff_t>(n));
		std::map<std::uint32_t, region> all;

		read_regions(part, all);
		EXPECT_TRUE(all.empty()) << n;
	}
	for (const auto &message : good_messages())
		for (std::size_t n = 0; n < message.size(); n++)
			read_all({message.begin(), message.begin() + static_cast<std::ptrdiff_t>(n)});
}

TEST(HostileNldev, LengthsThatLeadAstrayEndTheMessage)
{
	for (const auto &message : good_messages())
		for (std::size_t at = 0; at + 2 <= message.size(); at += NLA_ALIGNTO)
			for (const unsigned length : {0u, 1u, 3u, 4u, 5u, 0x7fffu, 0xffffu}) {
				auto changed = message;
				const auto n = static_cast<std::uint16_t>(length);

				std::memcpy(changed.data() + at, &n, sizeof(n));
				read_all(changed);
			}
}

TEST(HostileNldev, ChanceMessagesAreBorne)
{
	std::mt19937 random(1);
	const auto good = good_messages();

	for (int i = 0; i < 20000; i++) {
		auto message = good[random() % good.size()];

		for (auto changes = random() % 8; changes; changes--)
			message[random() % message.size()] = static_cast<std::byte>(random());
		message.resize(message.size() - std::min<std::size_t>(random() % 5, message.size()));
		message.shrink_to_fit();
		read_all(message);
	}
}

std::vector<std::byte> datagram(std::uint16_t type, std::uint32_t sequence, bytes content,
				std::uint32_t length = 0)
{
	const nlmsghdr head = {
	    .nlmsg_len = length ? length : static_cast<std::uint32_t>(NLMSG_HDRLEN + content.size()),
	    .nlmsg_type = type,
	    .nlmsg_flags = NLM_F_MULTI,
	    .nlmsg_seq = sequence,
	    .nlmsg_pid = 0};
	std::vector<std::byte> all(NLMSG_ALIGN(NLMSG_HDRLEN + content.size()));

	std::memcpy(all.data(), &head, sizeof(head));
	std::copy(content.begin(), content.end(), all.begin() + NLMSG_HDRLEN);
	return all;
}

bytes as_bytes(const int &n)
{
	return std::as_bytes(std::span(&n, 1));
}

constexpr std::uint16_t nldev_answer = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET);

TEST(Datagram, MessagesAreTakenOneByOneUntilTheEnd)
{
	const int ok = 0;
	auto all = datagram(nldev_answer, 5, attributes().u8(1, 1).get());
	const auto second = datagram(nldev_answer, 5, attributes().u32(1, 1).get()),
		   done = datagram(NLMSG_DONE, 5, as_bytes(ok));
	int n = 0;

	all.insert(all.end(), second.begin(), second.end());
	EXPECT_FALSE(read_datagram(all, 5, [&n](bytes b) { n += b.size() == 8; }).over);
	EXPECT_EQ(n, 2);
	all.insert(all.end(), done.begin(), done.end());
	const progress p = read_datagram(all, 5, [](bytes) {});
	EXPECT_TRUE(p.over);
	EXPECT_EQ(p.error, 0);
}

TEST(Datagram, WhatAnswersAnotherRequestIsPassedOver)
{
	const int error = -EINVAL;

	EXPECT_FALSE(read_datagram(datagram(NLMSG_ERROR, 4, as_bytes(error)), 5, [](bytes) { FAIL(); }).over);
	EXPECT_FALSE(read_datagram(datagram(nldev_answer, 4, {}), 5, [](bytes) { FAIL(); }).over);
	EXPECT_FALSE(read_datagram(datagram(NLMSG_NOOP, 5, {}), 5, [](bytes) { FAIL(); }).over);
}

TEST(Datagram, TheKernelsErrorIsTold)
{
	auto told = [](std::uint16_t type, int error) {
		const progress p = read_datagram(datagram(type, 5, as_bytes(error)), 5, [](bytes) {});

		EXPECT_TRUE(p.over);
		return p.error;
	};

	EXPECT_EQ(told(NLMSG_ERROR, -EINVAL), EINVAL);
	EXPECT_EQ(told(NLMSG_DONE, -EMSGSIZE), EMSGSIZE);
	EXPECT_EQ(told(NLMSG_ERROR, 0), 0);
	EXPECT_EQ(told(NLMSG_ERROR, 5), EPROTO);
	EXPECT_EQ(told(NLMSG_ERROR, INT_MIN), EPROTO);
	const progress p = read_datagram(datagram(NLMSG_ERROR, 5, {}), 5, [](bytes) {});
	EXPECT_TRUE(p.over);
	EXPECT_EQ(p.error, EPROTO);
}

TEST(Datagram, OneThatIsNotWholeIsRefused)
{
	const auto good = datagram(nldev_answer, 5, attributes().u64(1, 1).get());

	for (std::size_t n = 1; n < good.size(); n++)
		EXPECT_THROW(read_datagram({good.data(), n}, 5, [](bytes) {}), std::system_error) << n;
	for (const std::uint32_t length : {1u, 15u, 1000u, UINT32_MAX})
		EXPECT_THROW(read_datagram(datagram(nldev_answer, 5, {}, length), 5, [](bytes) {}),
			     std::system_error)
		    << length;
	EXPECT_FALSE(read_datagram({}, 5, [](bytes) { FAIL(); }).over);
}

std::vector<std::byte> pci_config(std::size_t size, bool relaxed)
{
	std::vector<std::byte> config(256);

	config[PCI_STATUS] = std::byte{PCI_STATUS_CAP_LIST};
	config[PCI_CAPABILITY_LIST] = std::byte{0xc0};
	config[0xc0 + PCI_CAP_LIST_ID] = std::byte{PCI_CAP_ID_PM};
	config[0xc0 + PCI_CAP_LIST_NEXT] = std::byte{0x60};
	config[0x60 + PCI_CAP_LIST_ID] = std::byte{PCI_CAP_ID_EXP};
	config[0x60 + PCI_EXP_DEVCTL] = static_cast<std::byte>(relaxed ? PCI_EXP_DEVCTL_RELAX_EN | 1 : 0xef);
	config.resize(size);
	return config;
}

TEST(Premises, RelaxedOrderingIsABitOfTheCapability)
{
	EXPECT_EQ(relaxed_ordering(pci_config(256, true)), true);
	EXPECT_EQ(relaxed_ordering(pci_config(256, false)), false);
	/* What others than root may read. */
	EXPECT_EQ(relaxed_ordering(pci_config(64, true)), std::nullopt);
	for (std::size_t n = 0; n < 256; n++) {
		const auto config = pci_config(n, true);
		const auto read = relaxed_ordering(config);
		EXPECT_TRUE(!read || (*read && n > 0xc0)) << n;
	}
}

TEST(Premises, ACapabilityListWithoutEndEnds)
{
	auto config = pci_config(256, true);

	config[0x60 + PCI_CAP_LIST_ID] = std::byte{PCI_CAP_ID_MSI};
	config[0x60 + PCI_CAP_LIST_NEXT] = std::byte{0xc0};
	EXPECT_EQ(relaxed_ordering(config), std::nullopt);
	config[PCI_CAPABILITY_LIST] = std::byte{0xfc};
	config[0xfc] = std::byte{PCI_CAP_ID_EXP};
	EXPECT_EQ(relaxed_ordering(config), std::nullopt);
	config[PCI_CAPABILITY_LIST] = std::byte{0x10};
	config[0x10] = std::byte{PCI_CAP_ID_EXP};
	EXPECT_EQ(relaxed_ordering(config), std::nullopt) << "in the header";
}

TEST(Premises, VtdSaysWhatItCan)
{
	EXPECT_TRUE(vtd_abilities("d2008c222f0606")->drains);
	EXPECT_FALSE(vtd_abilities("d2008c222f0606")->caching_mode);
	EXPECT_TRUE(vtd_abilities("d2008c222f0686")->caching_mode);
	EXPECT_FALSE(vtd_abilities("52008c222f0606")->drains) << "no DRD";
	EXPECT_FALSE(vtd_abilities("92008c222f0606")->drains) << "no DWD";
	for (const char *text : {"", "x", "0x1", "d2008c222f0606 ", "-1", "10000000000000000"})
		EXPECT_FALSE(vtd_abilities(text)) << text;
}

class directory
{
public:
	directory()
	{
		char name[] = "/tmp/npctl-XXXXXX";

		if (!mkdtemp(name))
			std::abort();
		path = name;
	}
	~directory()
	{
		std::error_code ignored;
		fs::remove_all(path, ignored);
	}
	directory(const directory &) = delete;
	directory &operator=(const directory &) = delete;
	void file(const std::string &name, bytes content) const
	{
		fs::create_directories(fs::path(path + "/" + name).parent_path());
		std::ofstream(path + "/" + name, std::ios::binary)
		    .write(reinterpret_cast<const char *>(content.data()),
			   static_cast<std::streamsize>(content.size()));
	}
	void file(const std::string &name, const std::string &content) const
	{
		file(name, std::as_bytes(std::span(content)));
	}

	std::string path;
};

TEST(Premises, AHostThatKeepsThemSaysSo)
{
	const directory d;

	d.file("config", pci_config(256, false));
	d.file("iommu/intel-iommu/cap", "d2008c222f0606\n");
	const auto all = premises(d.path, "in-order", true);
	ASSERT_EQ(all.size(), 6u);
	for (const std::size_t i : {0u, 1u, 3u, 4u})
		EXPECT_EQ(all[i].holds, verdict::yes) << all[i].name;
	for (const std::size_t i : {2u, 5u})
		EXPECT_EQ(all[i].holds, verdict::unknown) << all[i].name;
	for (const premise &p : all)
		EXPECT_NE(p.how, "") << p.name;
}

TEST(Premises, AHostThatBreaksThemSaysSo)
{
	const directory d;

	d.file("config", pci_config(256, true));
	d.file("iommu/intel-iommu/cap", "52008c222f0686\n");
	const auto all = premises(d.path, "out-of-order", false);
	EXPECT_EQ(all[0].holds, verdict::no);
	EXPECT_EQ(all[1].holds, verdict::unknown);
	EXPECT_EQ(all[3].holds, verdict::no);
	EXPECT_EQ(all[4].holds, verdict::unknown);
	/* The kernel has looked at the tables. */
	EXPECT_EQ(premises(d.path, "auto", true)[4].holds, verdict::yes);
	EXPECT_EQ(premises(d.path, "auto", true)[0].holds, verdict::unknown);
}

TEST(Premises, AnIommuOfAmdIsKnown)
{
	const directory plain, shadowed, broken;

	plain.file("iommu/amd-iommu/cap", "1b0f0023\n");
	EXPECT_EQ(premises(plain.path, "auto", true)[3].holds, verdict::unknown);
	EXPECT_EQ(premises(plain.path, "auto", true)[4].holds, verdict::yes);
	shadowed.file("iommu/amd-iommu/cap", "1f0f0023\n");
	EXPECT_EQ(premises(shadowed.path, "auto", false)[4].holds, verdict::no);
	broken.file("iommu/amd-iommu/cap", "?\n");
	EXPECT_EQ(premises(broken.path, "auto", false)[4].holds, verdict::unknown);
}

TEST(Premises, AVirtualFunctionIsWhatItsPhysicalOneIs)
{
	const directory d;

	d.file("config", pci_config(256, false));
	d.file("physfn/config", pci_config(256, true));
	EXPECT_EQ(premises(d.path, "auto", true)[1].holds, verdict::unknown);
}

TEST(Premises, WhatIsNotThereIsUnknown)
{
	const directory d;

	for (const premise &p : premises(d.path, std::nullopt, false)) {
		EXPECT_EQ(p.holds, verdict::unknown) << p.name;
		EXPECT_NE(p.how, "") << p.name;
	}
}

TEST(KernelLog, ARecordIsRead)
{
	const auto r = read_record("4,295,2623177,-;infiniband mlx5_0: unpinned memory regions refused: x\n"
				   " SUBSYSTEM=infiniband\n DEVICE=+infiniband:mlx5_0\n");
	ASSERT_TRUE(r);
	EXPECT_EQ(r->sequence, 295u);
	EXPECT_EQ(r->since_boot, std::chrono::microseconds(2623177));
	EXPECT_EQ(r->device, "mlx5_0");
	EXPECT_EQ(what_nprdma_says(*r), "unpinned memory regions refused: x");
}

TEST(KernelLog, RecordsOfOthersAreNot)
{
	auto says = [](const std::string &text, const std::string &device) {
		return what_nprdma_says({.sequence = 1, .since_boot = {}, .device = device, .text = text});
	};

	EXPECT_FALSE(says("infiniband mlx5_0: set_port_caps_atomic:1696", "mlx5_0"));
	EXPECT_FALSE(says("unpinned memory regions refused: x", "")) << "a process wrote it";
	EXPECT_EQ(says("infiniband mlx5_0: nprdma: QP 5 kept a hold", "mlx5_0"), "nprdma: QP 5 kept a hold");
	EXPECT_EQ(says("infiniband x: re-registration refused: an unpinned memory region cannot change", "x"),
		  "re-registration refused: an unpinned memory region cannot change");
}

TEST(KernelLog, WhatIsNoRecordIsNone)
{
	for (const char *text :
	     {"", ";", "4,295", "4,295,1", "x,295,1,-;t", "4,x,1,-;t", "4,295,x,-;t", "4,295,-1,-;t",
	      "4,99999999999999999999,1,-;t", "4,295,18446744073709551615,-;t"})
		EXPECT_FALSE(read_record(text)) << text;
	EXPECT_TRUE(read_record("4,295,1,-;"));
	EXPECT_EQ(read_record("4,295,1,-;a\n DEVICE=+infiniband:")->device, "");
	EXPECT_EQ(read_record("4,295,1,-;a\n DEVICE=+pci:0")->device, "");
}

/* A kernel that keeps these numbers of refusals. */
struct ring {
	std::vector<std::uint64_t> numbers;
	std::uint64_t oldest = 1;
	int asked = 0;

	int operator()(std::uint64_t after, rdma_np_refusal &to)
	{
		asked++;
		to.oldest = oldest;
		to.flags = RDMA_NP_REFUSAL_ALL;
		for (const std::uint64_t n : numbers)
			if (n > after) {
				to.seq = n;
				to.pid = static_cast<std::uint32_t>(n + 100);
				to.time = n * 1000;
				std::strcpy(to.command, "c");
				std::strcpy(to.device, "mlx5_0");
				std::strcpy(to.text, ("text " + std::to_string(n)).c_str());
				break;
			}
		return 0;
	}
};

TEST(Refusals, AreReadInTheirOrder)
{
	ring r{.numbers = {5, 6, 9}, .oldest = 4};
	const auto all = read_refusals(std::ref(r));

	ASSERT_TRUE(all);
	ASSERT_EQ(all->records.size(), 3u);
	EXPECT_EQ(r.asked, 4);
	EXPECT_TRUE(all->of_all);
	EXPECT_EQ(all->overwritten, 3u);
	EXPECT_EQ(all->records[2].sequence, 9u);
	EXPECT_EQ(all->records[2].pid, 109u);
	EXPECT_EQ(all->records[2].since_boot, std::chrono::nanoseconds(9000));
	EXPECT_EQ(all->records[2].command, "c");
	EXPECT_EQ(all->records[2].device, "mlx5_0");
	EXPECT_EQ(all->records[2].text, "text 9");
}

TEST(Refusals, OfNobodyAreNone)
{
	ring r;
	const auto all = read_refusals(std::ref(r));

	ASSERT_TRUE(all);
	EXPECT_TRUE(all->records.empty());
	EXPECT_EQ(all->overwritten, 0u);
}

TEST(Refusals, AKernelThatDoesNotKnowTheMethodIsKnown)
{
	for (const int error : {EPROTONOSUPPORT, ENOTTY, EINVAL})
		EXPECT_FALSE(read_refusals([error](std::uint64_t, rdma_np_refusal &) { return -error; }));
	EXPECT_THROW((void)read_refusals([](std::uint64_t, rdma_np_refusal &) { return -ENODEV; }),
		     std::system_error);
}

TEST(Refusals, WhoeverGoesOnRefusingKeepsNobodyHere)
{
	std::uint64_t last = 0;
	const auto all = read_refusals([&last](std::uint64_t after, rdma_np_refusal &to) {
		EXPECT_EQ(after, last);
		to.seq = ++last;
		return 0;
	});

	ASSERT_TRUE(all);
	EXPECT_LT(all->records.size(), 1000u);
}

TEST(Refusals, WhatMakesNoSenseEnds)
{
	/* The same one for ever; no string has an end, and no time is that long. */
	const auto all = read_refusals([](std::uint64_t, rdma_np_refusal &to) {
		std::memset(&to, 0xff, sizeof(to));
		to.seq = 7;
		return 0;
	});

	ASSERT_TRUE(all);
	ASSERT_EQ(all->records.size(), 1u);
	EXPECT_EQ(all->records[0].text.size(), std::size_t{RDMA_NP_REFUSAL_TEXT});
	EXPECT_EQ(all->records[0].command.size(), std::size_t{RDMA_NP_REFUSAL_COMMAND});
	EXPECT_EQ(all->records[0].device.size(), std::size_t{RDMA_NP_REFUSAL_DEVICE});
	EXPECT_GE(all->records[0].since_boot.count(), 0);
}

TEST(QueuePairs, HowThePeersKernelIsReachedIsSaid)
{
	auto text = [](std::uint32_t flags) {
		rdma_np_qp_info info{};

		info.flags = flags;
		return std::string(kernel_text(info));
	};

	EXPECT_EQ(text(0), "silent");
	EXPECT_EQ(text(RDMA_NP_QP_ASKING), "asked");
	EXPECT_EQ(text(RDMA_NP_QP_HEARD), "MAD");
	EXPECT_EQ(text(RDMA_NP_QP_HEARD | RDMA_NP_QP_ASKING), "MAD");
	EXPECT_EQ(text(RDMA_NP_QP_HEARD | RDMA_NP_QP_QUICK), "quick");
	EXPECT_EQ(text(RDMA_NP_QP_QUICK), "silent") << "nothing was heard there";
}

TEST(QueuePairs, ADeviceThatIsNotThereCannotBeOpened)
{
	EXPECT_THROW(opened_device("no_such_device"), std::system_error);
}

TEST(Json, IsWrittenOnOneLine)
{
	EXPECT_EQ(json(json::object{{"a", 1u},
				    {"b", json::list{true, json(), 1.5, "x"}},
				    {"c", json::object{}},
				    {"d", std::optional<double>()},
				    {"e", UINT64_MAX}})
		      .text(),
		  R"({"a":1,"b":[true,null,1.500,"x"],"c":{},"d":null,"e":18446744073709551615})");
	EXPECT_EQ(json(std::numeric_limits<double>::quiet_NaN()).text(), "null");
}

TEST(Json, TextFromOutsideCannotLeaveItsQuotes)
{
	EXPECT_EQ(json("a\"b\\c\n\033[2J\x80\x7f").text(), R"("a\"b\\c??[2J??")");
}

} // namespace
