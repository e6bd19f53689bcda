// MPI ranks copy their neighbour's device memory, ordered by timelines; when one is killed, the others
// say which.
//
//   mpicxx -std=c++17 ring.cpp $(pkg-config --cflags --libs warpipe) -o ring
//   mpirun -n 4 ./ring [--device cuda]
//   mpirun -disable-auto-cleanup -n 4 ./ring --kill 2
//
// MPI carries the tickets. Then each rank maps the memory of its left neighbour, and in each round
// copies it into memory of its own: a stream waits for the neighbour's timeline, no CPU does before the
// end of the round. With --kill a rank kills itself half-way; docs/guide/mpi.md says why that needs the
// option of the launcher, and the process between it and each rank (`keep`). It ends with `ok: ...`.

#include <mpi.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "warpipe.hpp"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto LIMIT = 60s;
// How long a wait for another rank lasts before it asks whether a rank has died.
constexpr auto SLICE = 100ms;
constexpr std::size_t COUNT = 1 << 18;
constexpr std::uint64_t ROUNDS = 10;
constexpr int TICKET_BYTES_MAX = 4096;

struct Arguments {
  std::string device;
  int victim = -1;
};

[[noreturn]] void fail(const std::string &what) { throw std::runtime_error(what); }

Arguments parse(int argc, char **argv) {
  Arguments found;
  for (int at = 1; at < argc; at += 2) {
    const std::string name = argv[at];
    if (at + 1 == argc || (name != "--device" && name != "--kill"))
      fail("usage: ring [--device host|cuda] [--kill RANK]; not " + name);
    if (name == "--device") {
      found.device = argv[at + 1];
      continue;
    }
    char *end = nullptr;
    const long rank = std::strtol(argv[at + 1], &end, 10);
    if (*end != '\0' || end == argv[at + 1] || rank < 0 || rank > 1 << 20)
      fail("--kill is the number of a rank, not " + std::string(argv[at + 1]));
    found.victim = static_cast<int>(rank);
  }
  return found;
}

// A descriptor on which a rank says how its death is to be taken.
int notices = -1;

void tell(char notice) {
  if (write(notices, &notice, 1) != 1)
    fail("the process that started this rank has gone");
}

// Goes on in a child, and makes an exit of the child's death: the launcher kills all ranks when one is
// killed by a signal. Before the child has told 's' (survivable) the others may wait within MPI for
// ever, so this process dies then, too.
void keep() {
  signal(SIGUSR1, SIG_IGN);
  int ends[2];
  if (pipe(ends) != 0)
    fail("no pipe");
  const pid_t child = fork();
  if (child < 0)
    fail("no child");
  if (child == 0) {
    close(ends[0]);
    notices = ends[1];
    return;
  }
  close(ends[1]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
  }
  char said[2] = {};
  const ssize_t count = read(ends[0], said, sizeof said);
  if (!WIFSIGNALED(status))
    _exit(WEXITSTATUS(status));
  if (count < 1) {
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
  }
  _exit(count == 2 ? 0 : 128 + WTERMSIG(status));
}

// The other ranks, as members of warpipe's domain.
class Ranks {
public:
  Ranks(const std::string &job, int rank)
      : prefix_(job + "/rank-"), rank_(rank), member_(prefix_ + std::to_string(rank)) {}

  void say(const std::string &text) const {
    const std::string line = "rank " + std::to_string(rank_) + ": " + text + "\n";
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  }

  // Takes in what has happened, waiting up to `timeout` for it.
  void look(warpipe::Duration timeout) {
    while (const auto change = watch_.next_change(timeout)) {
      timeout = 0s;
      const std::string name = change->member.name;
      if (name.compare(0, prefix_.size(), prefix_) != 0)
        continue;
      const int rank = std::stoi(name.substr(prefix_.size()));
      if (change->kind == WARPIPE_CHANGE_DIED) {
        say("rank " + std::to_string(rank) + " (pid " + std::to_string(change->member.pid) +
            ") has died");
        dead_.push_back(rank);
      }
    }
  }

  const std::vector<int> &dead() const { return dead_; }

  // Repeats a short wait until it succeeds or a rank has died; whether it has succeeded.
  bool patiently(const std::function<void()> &attempt) {
    const auto end = Clock::now() + LIMIT;
    while (dead_.empty()) {
      try {
        attempt();
        return true;
      } catch (const warpipe::Timeout &) {
        if (Clock::now() > end)
          throw;
      } catch (const warpipe::PeerGone &) {
        // Dead, or it has noticed a death before this rank.
        await_death();
        return false;
      }
      look(0s);
    }
    return false;
  }

private:
  void await_death() {
    const auto end = Clock::now() + LIMIT;
    while (dead_.empty() && Clock::now() < end)
      look(SLICE);
    if (dead_.empty())
      fail("a ring fails only with a rank");
  }

  std::string prefix_;
  int rank_;
  warpipe::Member member_;
  warpipe::Members watch_;
  std::vector<int> dead_;
};

std::vector<float> input(int rank, std::uint64_t round) {
  return std::vector<float>(COUNT, static_cast<float>(100 * rank) + static_cast<float>(round));
}

// This rank's memory, its left neighbour's, and everybody's timeline: how many steps a rank has done.
class Ring {
public:
  Ring(MPI_Comm node, const std::string &job, const std::string &device)
      : device_(device.empty() ? warpipe::Device() : warpipe::Device(device)), stream_(device_),
        memory_(warpipe::Memory::allocate(device_, COUNT * sizeof(float))),
        inbox_(warpipe::Memory::allocate(device_, COUNT * sizeof(float))) {
    MPI_Comm_rank(node, &rank_);
    MPI_Comm_size(node, &size_);
    left_ = (rank_ + size_ - 1) % size_;
    const auto name = [&](int rank, const char *what) {
      return job + "/" + std::to_string(rank) + "/" + what;
    };
    warpipe::CreateOptions mine;
    mine.device = device_.get();
    steps_.emplace(rank_, warpipe::Timeline::create(name(rank_, "steps"), mine));
    const warpipe::Published published(memory_, name(rank_, "memory"));

    std::string ticket = published.ticket();
    if (ticket.size() >= TICKET_BYTES_MAX)
      fail("a ticket of " + std::to_string(ticket.size()) + " bytes");
    ticket.resize(TICKET_BYTES_MAX);
    std::string tickets(static_cast<std::size_t>(size_) * TICKET_BYTES_MAX, '\0');
    MPI_Allgather(ticket.data(), TICKET_BYTES_MAX, MPI_CHAR, tickets.data(), TICKET_BYTES_MAX,
                  MPI_CHAR, node);
    const char *theirs = tickets.data() + static_cast<std::size_t>(left_) * TICKET_BYTES_MAX;
    theirs_ = warpipe::Memory::open(theirs, device_, LIMIT);
    for (int rank = 0; rank < size_; ++rank) {
      warpipe::OpenOptions options;
      options.device = device_.get();
      options.wait_ns = warpipe::nanoseconds(LIMIT);
      if (rank != rank_)
        steps_.emplace(rank, warpipe::Timeline::open(name(rank, "steps"), options));
    }
    // The names are needed until all have opened them.
    MPI_Barrier(node);
  }

  // Exchanges ROUNDS times; false if a rank has died.
  bool run(Ranks &ranks, int victim) {
    for (std::uint64_t round = 0; round < ROUNDS; ++round) {
      const std::vector<float> values = input(rank_, round);
      const std::size_t bytes = values.size() * sizeof(float);
      memory_.write(stream_, 0, values.data(), bytes);
      step();
      if (rank_ == victim && round == ROUNDS / 2) {
        tell('k');
        raise(SIGKILL);
      }
      try {
        steps_.at(left_).wait(stream_, done_);
      } catch (const warpipe::PeerGone &) {
        // `agree` says so.
      }
      memory_copy(bytes);
      step();
      if (!agree(ranks))
        return false;
      if (inbox_.to_vector<float>(LIMIT) != input(left_, round))
        fail("the inbox does not hold the left neighbour's input");
    }
    return true;
  }

private:
  // Counts a step, behind the work on the stream.
  void step() { steps_.at(rank_).signal(stream_, ++done_); }

  void memory_copy(std::size_t bytes) {
    theirs_.used_on(stream_);
    inbox_.used_on(stream_);
    warpipe::check(warpipe_stream_copy(device_.get(), stream_, inbox_.info().data,
                                       theirs_.info().data, bytes));
  }

  // Waits until every rank has found its copy complete. A stream goes on when the rank that it waits
  // for has died, so a rank asks first whether what it waited for came.
  bool agree(Ranks &ranks) {
    const auto reached = [&](int rank, std::uint64_t value) {
      return ranks.patiently([&, rank, value] { steps_.at(rank).wait_host(value, SLICE); });
    };
    if (!reached(rank_, done_) || !reached(left_, done_ - 1))
      return false;
    steps_.at(rank_).signal_now(++done_);
    for (int rank = 0; rank < size_; ++rank)
      if (!reached(rank, done_))
        return false;
    return true;
  }

  warpipe::Device device_;
  warpipe::Stream stream_;
  warpipe::Memory memory_, inbox_, theirs_;
  std::map<int, warpipe::Timeline> steps_;
  std::uint64_t done_ = 0;
  int rank_ = 0, size_ = 0, left_ = 0;
};

int run(const Arguments &arguments) {
  // MPI's own waits have no limit.
  alarm(60);
  MPI_Init(nullptr, nullptr);
  MPI_Comm node;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  int rank = 0, size = 0;
  MPI_Comm_rank(node, &rank);
  MPI_Comm_size(node, &size);
  const bool kills = arguments.victim >= 0;
  if (kills && (arguments.victim >= size || size == 1)) {
    if (rank == 0)
      std::fprintf(stderr, "--kill: there is no such rank beside others\n");
    MPI_Finalize();
    return 2;
  }
  std::uint32_t number = std::random_device{}();
  MPI_Bcast(&number, 1, MPI_UINT32_T, 0, node);
  const std::string job = "mpi-" + std::to_string(number);
  Ranks ranks(job, rank);
  Ring ring(node, job, arguments.device);
  MPI_Barrier(node);
  alarm(0);
  if (kills)
    tell('s');
  const bool is_whole = ring.run(ranks, arguments.victim);
  if (!kills) {
    if (!is_whole)
      return 1;
    MPI_Finalize();
    if (rank == 0)
      ranks.say("ok: " + std::to_string(size) + " ranks have copied each other's memory");
    return 0;
  }
  if (is_whole || ranks.dead() != std::vector<int>{arguments.victim})
    fail("another rank has died than the one that was to");
  ranks.say("ok: goes on without rank " + std::to_string(arguments.victim));
  return 0;
}

} // namespace

int main(int argc, char **argv) {
  try {
    const Arguments arguments = parse(argc, argv);
    if (arguments.victim >= 0)
      keep();
    return run(arguments);
  } catch (const std::exception &error) {
    std::fprintf(stderr, "ring: %s\n", error.what());
    return 2;
  }
}
