/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * UMap's network stores: servers and clients of nprdma-far, which find each other by a file.
 *
 * Contexts of the transport are never ended: mappings, which use them, live as long as the process does.
 */
#include "protocol.hpp"
#include "umap_stores.hpp"

#include <umap/store/StoreNetwork.h>
#include <umap/umap.h>

#include <nprdma/far_network.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

namespace far = nprdma::far;
namespace transport = nprdma::transport;

namespace Umap
{

namespace
{

using namespace std::chrono_literals;

constexpr auto patience = 10s; /* for who is started at the same time */
constexpr auto pause = 20ms;   /* between two looks at a file */
constexpr const char *well_known_port = "8080";

[[noreturn]] void fail(const far::error &e)
{
	throw std::system_error(e.code, std::generic_category(), e.text);
}

template <class T> T must(far::result<T> r)
{
	if (!r)
		fail(r.why());
	return std::move(*r);
}

std::string variable(const char *name, const std::string &otherwise = {})
{
	const char *const text = std::getenv(name);

	return text && *text ? text : otherwise;
}

/* Of the kind of @address. */
far::result<transport::context *> context_of(const std::string &address)
{
	static std::mutex mutex;
	static auto *const all = new std::map<std::string, std::unique_ptr<transport::context>>;
	const std::lock_guard guard(mutex);
	const std::string kind = address.substr(0, address.find(':'));

	if (const auto i = all->find(kind); i != all->end())
		return i->second.get();
	auto c = transport::open(kind);
	if (!c)
		return c.why();
	return all->emplace(kind, std::move(*c)).first->second.get();
}

bool has_device()
{
	static const bool it_has = [] {
		const bool has = bool(context_of("verbs:"));

		if (!has)
			(void)std::fprintf(stderr, "umap: there is no RDMA device: regions are lent between "
						   "processes of this host\n");
		return has;
	}();

	return it_has;
}

std::string host_name()
{
	char name[256] = {};

	return ::gethostname(name, sizeof(name) - 1) ? "localhost" : name;
}

/* Where a server listens. With @port "0" clients are told by a file. */
std::string listen_address(const std::string &port)
{
	const std::string said = variable("NPRDMA_UMAP_ADDRESS");

	if (!said.empty())
		return said;
	if (has_device())
		return "verbs::" + port;
	return "shm:umap-" + (port == "0" ? std::to_string(::getpid()) : port);
}

/* Of a host, or what is an address already. */
std::string connect_address(const std::string &server)
{
	if (server.starts_with("shm:") || server.starts_with("verbs:"))
		return server;
	return has_device() ? "verbs:" + server + ":" + well_known_port
			    : std::string("shm:umap-") + well_known_port;
}

/* What the processes that were started together are: this one's number, how many, and a name that others
 * lack. */
struct company {
	unsigned rank = 0, size = 1;
	std::string name;

	static company find()
	{
		static constexpr struct {
			const char *rank, *size, *name;
		} launchers[] = {
		    {"PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"},
		    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess_base_jobid"},
		    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"},
		    {"PMI_RANK", "PMI_SIZE", "PMI_JOBID"},
		};

		for (const auto &l : launchers) {
			const std::string rank = variable(l.rank), size = variable(l.size);
			if (rank.empty() || size.empty())
				continue;
			company c;
			c.rank = static_cast<unsigned>(std::strtoul(rank.c_str(), nullptr, 10));
			c.size = static_cast<unsigned>(std::strtoul(size.c_str(), nullptr, 10));
			c.name = variable(l.name, std::to_string(::getppid()));
			std::ranges::replace(c.name, '/', '-');
			if (c.rank < c.size)
				return c;
		}
		return {};
	}
};

std::string server_file()
{
	return variable("NPRDMA_UMAP_SERVERFILE", "serverfile");
}

std::string content_of(const std::string &path)
{
	std::ifstream file(path);

	return {std::istreambuf_iterator<char>(file), {}};
}

/* Whoever reads @path reads all of @text, or what was there before. */
void put(const std::string &path, const std::string &text)
{
	const std::string fresh = path + "." + std::to_string(::getpid());
	std::ofstream file(fresh, std::ios::trunc);

	file << text;
	file.close();
	if (!file || std::rename(fresh.c_str(), path.c_str())) {
		const int code = errno;
		(void)std::remove(fresh.c_str());
		throw std::system_error(code ? code : EIO, std::generic_category(), path);
	}
}

/* The server of this process's StoreNetworkServers, from the first one to the last. */
class lender
{
public:
	lender()
	    : listening_(listen_address("0")),
	      server_(must(far::server::make(*must(context_of(listening_)), listening_)))
	{
		std::string address = server_->address();
		const company us = company::find();

		/* Other hosts know this one by its name. */
		if (address.starts_with("verbs::"))
			address.insert(std::strlen("verbs:"), host_name());
		address += '\n';
		if (us.size > 1)
			put(part(us, us.rank), address);
		if (us.rank)
			return;
		published_ = us.size > 1 ? collect(us) : address;
		put(file_, published_);
	}
	~lender()
	{
		/* Unless it is another one's by now. */
		if (!published_.empty() && content_of(file_) == published_)
			(void)std::remove(file_.c_str());
	}
	lender(const lender &) = delete;
	lender &operator=(const lender &) = delete;

	static std::shared_ptr<lender> get()
	{
		static std::mutex mutex;
		static auto *const last = new std::weak_ptr<lender>;
		const std::lock_guard guard(mutex);
		std::shared_ptr<lender> l = last->lock();

		if (!l)
			*last = l = std::make_shared<lender>();
		return l;
	}
	[[nodiscard]] far::server &server() noexcept { return *server_; }

private:
	[[nodiscard]] std::string part(const company &us, unsigned rank) const
	{
		return file_ + "." + us.name + "." + std::to_string(rank);
	}
	[[nodiscard]] std::string collect(const company &us) const
	{
		const auto deadline = transport::clock::now() + 6 * patience;
		std::string all;

		for (unsigned rank = 0; rank < us.size; rank++) {
			std::string one;

			while ((one = content_of(part(us, rank))).empty()) {
				if (transport::clock::now() >= deadline)
					fail({ETIMEDOUT, "umap: the server of rank " + std::to_string(rank) +
							     " did not write " + part(us, rank)});
				std::this_thread::sleep_for(pause);
			}
			all += one;
		}
		for (unsigned rank = 0; rank < us.size; rank++)
			(void)std::remove(part(us, rank).c_str());
		return all;
	}

	const std::string file_ = server_file(), listening_;
	const std::unique_ptr<far::server> server_;
	std::string published_; /* by this process */
};

/* Parts of several servers, one behind the other. */
class joined final : public far::store
{
public:
	explicit joined(std::vector<std::shared_ptr<far::store>> parts) : parts_(std::move(parts))
	{
		for (const auto &p : parts_)
			ends_.push_back(bytes() + p->bytes());
	}

	[[nodiscard]] std::uint64_t bytes() const noexcept override
	{
		return ends_.empty() ? 0 : ends_.back();
	}
	far::status read(const far::piece &p) noexcept override { return read_many({&p, 1}); }
	far::status write(const far::piece &p) noexcept override { return write_many({&p, 1}); }
	far::status read_many(std::span<const far::piece> pieces) noexcept override
	{
		return each(pieces, [](far::store &s, auto some) { return s.read_many(some); });
	}
	far::status write_many(std::span<const far::piece> pieces) noexcept override
	{
		return each(pieces, [](far::store &s, auto some) { return s.write_many(some); });
	}
	far::status flush() noexcept override
	{
		for (const auto &p : parts_)
			if (far::status s = p->flush(); !s)
				return s;
		return {};
	}
	far::status attach(std::span<std::byte> frames) noexcept override
	{
		for (std::size_t i = 0; i < parts_.size(); i++)
			if (far::status s = parts_[i]->attach(frames); !s) {
				while (i--)
					parts_[i]->detach(frames);
				return s;
			}
		return {};
	}
	void detach(std::span<std::byte> frames) noexcept override
	{
		for (const auto &p : parts_)
			p->detach(frames);
	}

private:
	/* A page may be of two servers. */
	template <class F> far::status each(std::span<const far::piece> pieces, F f)
	{
		std::vector<std::vector<far::piece>> of(parts_.size());

		for (far::piece p : pieces) {
			if (p.offset > bytes() || p.memory.size() > bytes() - p.offset)
				return far::error{EINVAL, "umap: behind the end of what servers lend"};
			while (!p.memory.empty()) {
				const auto i = static_cast<std::size_t>(
				    std::ranges::upper_bound(ends_, p.offset) - ends_.begin());
				const std::size_t n =
				    std::min<std::uint64_t>(p.memory.size(), ends_[i] - p.offset);

				of[i].push_back(
				    {p.offset - (ends_[i] - parts_[i]->bytes()), p.memory.first(n)});
				p = {p.offset + n, p.memory.subspan(n)};
			}
		}
		for (std::size_t i = 0; i < of.size(); i++)
			if (!of[i].empty())
				if (far::status s = f(*parts_[i], of[i]); !s)
					return s;
		return {};
	}

	const std::vector<std::shared_ptr<far::store>> parts_;
	std::vector<std::uint64_t> ends_;
};

/* The servers of the file, which is there soon, and may still be the last server's. */
far::result<std::shared_ptr<far::store>> find_parts(const std::string &id)
{
	std::vector<std::shared_ptr<far::store>> parts;
	std::ifstream file(server_file());

	for (std::string address; std::getline(file, address);) {
		far::network_options how;

		if (address.empty())
			continue;
		how.shared = true;
		auto context = context_of(address);
		if (!context)
			return context.why();
		auto part = far::network_store::open(**context, address, id, how);
		if (part)
			parts.push_back(std::move(*part));
		/* Not every server need have a part of it. */
		else if (part.code() != ENOENT)
			return part.why();
	}
	if (parts.empty())
		return far::error{ENOENT, "umap: no server of the file " + server_file() +
					      " lends memory by the name \"" + id + "\""};
	for (std::size_t i = 0; i + 1 < parts.size(); i++)
		if (parts[i]->bytes() % 4096)
			return far::error{EINVAL, "umap: the parts of \"" + id +
						      "\" are not of whole pages of 4 KiB"};
	if (parts.size() == 1)
		return parts[0];
	return std::shared_ptr<far::store>(std::make_shared<joined>(std::move(parts)));
}

std::shared_ptr<far::store> find(const std::string &id, std::size_t bytes)
{
	const auto deadline = transport::clock::now() + patience;

	for (;;) {
		auto s = find_parts(id);
		if (s && (*s)->bytes() >= bytes)
			return *s;
		if (s)
			fail({EINVAL, "umap: servers lend " + std::to_string((*s)->bytes()) +
					  " bytes by the name \"" + id + "\", and not " +
					  std::to_string(bytes)});
		if (s.code() == EINVAL || transport::clock::now() >= deadline)
			fail(s.why());
		std::this_thread::sleep_for(pause);
	}
}

std::uint64_t most_bytes()
{
	const auto of_host = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
			     static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
	const std::string said = variable("NPRDMA_UMAP_SERVER_BYTES");
	char *end = nullptr;

	if (said.empty())
		return of_host;
	errno = 0;
	const unsigned long long n = std::strtoull(said.c_str(), &end, 0);
	if (errno || *end || said[0] == '-')
		fail({EINVAL, "umap: NPRDMA_UMAP_SERVER_BYTES=" + said + ": not a number"});
	return n;
}

} // namespace

struct NetworkServer::state {
	std::unique_ptr<far::server> server;
};

NetworkServer::NetworkServer() : state_(std::make_unique<state>())
{
	const std::string address = listen_address(well_known_port);
	far::server_options how;

	how.clients_may_make = most_bytes();
	state_->server = must(far::server::make(*must(context_of(address)), address, how));
}

NetworkServer::~NetworkServer() = default;

void NetworkServer::wait_till_disconnect()
{
	state_->server->wait_until_left();
}

struct NetworkClient::state {
	transport::context *context;
	std::string address;
	/* Says nothing; the server knows by it that somebody is there. */
	std::unique_ptr<transport::connection> presence;

	std::mutex mutex;
	std::map<std::string, std::weak_ptr<far::store>> stores;
};

NetworkClient::NetworkClient(const std::string &address) : state_(std::make_unique<state>())
{
	const auto deadline = transport::clock::now() + patience;

	state_->address = connect_address(address);
	state_->context = must(context_of(state_->address));
	for (;;) {
		auto c = state_->context->connect(state_->address, deadline, far::protocol_room);
		if (c) {
			state_->presence = std::move(*c);
			return;
		}
		if (c.code() != ECONNREFUSED || transport::clock::now() >= deadline)
			fail(c.why());
		std::this_thread::sleep_for(pause);
	}
}

NetworkClient::~NetworkClient() = default;

StoreNetwork::StoreNetwork(const std::string &id, std::size_t bytes, NetworkEndpoint *endpoint,
			   bool compression)
    : size_(bytes)
{
	const auto *const client = dynamic_cast<NetworkClient *>(endpoint);
	far::network_options how;

	if (!client)
		fail({EINVAL, "umap: a StoreNetwork is of a NetworkClient"});
	NetworkClient::state &of = *client->state_;
	const std::lock_guard guard(of.mutex);
	std::string name = id;
	for (unsigned n = 2; !of.stores[name].expired(); n++)
		name = id + "#" + std::to_string(n);
	how.make_bytes = bytes;
	how.page_bytes = umapcfg_get_umap_page_size();
	how.code = compression ? far::coding::lz4 : far::coding::raw;
	of.stores[name] = store_ = must(far::network_store::open(*of.context, of.address, name, how));
}

StoreNetwork::StoreNetwork(std::shared_ptr<far::store> store, std::size_t size)
    : store_(std::move(store)), size_(size)
{
}

StoreNetwork::~StoreNetwork() = default;

ssize_t StoreNetwork::read_from_store(char *buf, std::size_t nb, off_t off)
{
	return transfer(store_, buf, nb, off, false);
}
ssize_t StoreNetwork::write_to_store(char *buf, std::size_t nb, off_t off)
{
	return transfer(store_, buf, nb, off, true);
}

struct StoreNetworkServer::state {
	std::string id;
	std::span<char> memory;
	std::size_t clients;
	std::shared_ptr<lender> by;

	/* As much of @nb bytes at @off as there is. */
	[[nodiscard]] std::span<char> at(std::size_t nb, off_t off) const
	{
		const auto from = std::min(static_cast<std::size_t>(off), memory.size());

		return memory.subspan(from, std::min(nb, memory.size() - from));
	}
};

StoreNetworkServer::StoreNetworkServer(const char *id, void *memory, std::size_t bytes, std::size_t clients)
    : StoreNetwork(nullptr, bytes),
      state_(std::make_unique<state>(state{id, {static_cast<char *>(memory), bytes}, clients, lender::get()}))
{
	if (far::status s = state_->by->server().lend(id, std::as_writable_bytes(state_->memory)); !s)
		fail(s.why());
}

StoreNetworkServer::~StoreNetworkServer()
{
	if (far::status s = state_->by->server().withdraw_after(state_->id, state_->clients); !s)
		(void)std::fprintf(stderr, "umap: %s\n", s.why().text.c_str());
}

ssize_t StoreNetworkServer::read_from_store(char *buf, std::size_t nb, off_t off)
{
	if (off < 0)
		return -1;
	const std::span<char> from = state_->at(nb, off);
	std::ranges::copy(from, buf);
	return static_cast<ssize_t>(from.size());
}

ssize_t StoreNetworkServer::write_to_store(char *buf, std::size_t nb, off_t off)
{
	if (off < 0)
		return -1;
	const std::span<char> to = state_->at(nb, off);
	std::copy_n(buf, to.size(), to.begin());
	return static_cast<ssize_t>(to.size());
}

StoreNetworkClient::StoreNetworkClient(const char *id, std::size_t bytes)
    : StoreNetworkClient(find(id, bytes), bytes)
{
}

StoreNetworkClient::StoreNetworkClient(std::shared_ptr<far::store> store, std::size_t bytes)
    : StoreNetwork(store, bytes ? bytes : store->bytes())
{
}

StoreNetworkClient::~StoreNetworkClient() = default;

namespace
{

struct lent_memory {
	std::mutex mutex;
	std::map<const void *, std::unique_ptr<StoreNetworkServer>> at;
};

/* Never ended: whoever lends until the process ends does not wait for clients then. */
lent_memory &lent()
{
	static auto *const l = new lent_memory;

	return *l;
}

} // namespace

bool unlend(const void *memory)
{
	std::unique_ptr<StoreNetworkServer> one;
	lent_memory &l = lent();
	const std::lock_guard guard(l.mutex);
	const auto i = l.at.find(memory);

	if (i == l.at.end())
		return false;
	one = std::move(i->second);
	l.at.erase(i);
	return true;
}

} // namespace Umap

extern "C" void *umap_network(const char *id, void *memory, size_t bytes)
{
	using namespace Umap;

	try {
		if (memory) {
			auto server = std::make_unique<StoreNetworkServer>(id, memory, bytes);
			lent_memory &l = lent();
			const std::lock_guard guard(l.mutex);

			l.at[memory] = std::move(server);
			return memory;
		}
		StoreNetworkClient client(id, bytes);
		return umap_ex(nullptr, client.get_size(), PROT_READ, UMAP_PRIVATE, -1, 0, &client);
	} catch (const std::system_error &e) {
		(void)std::fprintf(stderr, "umap: %s\n", e.what());
		errno = e.code().value();
	} catch (const std::bad_alloc &) {
		errno = ENOMEM;
	}
	return UMAP_FAILED;
}
