// The common set-up of the examples: arguments, a domain of their own, and their other processes.
//
// A program that is started without --role is the first process: it makes a domain in a temporary
// folder, and starts itself once more for each other role with posix_spawn. It never forks: CUDA
// does not survive that.

#ifndef STAGE_HPP
#define STAGE_HPP

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <warpipe.hpp>

namespace stage {

// Longer than any step of an example takes: a wait that reaches it is an error.
inline constexpr std::chrono::seconds patience{60};

inline void ensure(bool holds, const std::string &otherwise) {
  if (!holds)
    throw std::runtime_error(otherwise);
}

// A mistake on the command line.
class Misuse : public std::runtime_error {
public:
  using std::runtime_error::runtime_error;
};

// The result of a system call.
inline int checked(long result, const char *call) {
  if (result < 0)
    throw std::system_error(errno, std::generic_category(), call);
  return static_cast<int>(result);
}

// A file descriptor, closed when this is destroyed.
class Descriptor {
public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor &&other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor &operator=(Descriptor &&other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0)
      close(fd_);
  }

  int get() const { return fd_; }

  bool is_readable(std::chrono::milliseconds timeout) const {
    pollfd entry{fd_, POLLIN, 0};
    return checked(poll(&entry, 1, static_cast<int>(timeout.count())), "poll") > 0;
  }

private:
  int fd_;
};

// Reads the lines of text that a process writes.
class Lines {
public:
  explicit Lines(int fd, std::string writer = "the process at the other end")
      : fd_(fd), writer_(std::move(writer)) {}

  std::string next() {
    for (;;) {
      const std::size_t end = text_.find('\n');
      if (end != std::string::npos) {
        const std::string line = text_.substr(0, end);
        text_.erase(0, end + 1);
        return line;
      }
      ensure(fd_.is_readable(patience), "no line came from " + writer_);
      char part[4096];
      const int count = checked(read(fd_.get(), part, sizeof part), "read");
      ensure(count > 0, writer_ + " has ended; if it failed, its words are above");
      text_.append(part, static_cast<std::size_t>(count));
    }
  }

private:
  Descriptor fd_;
  std::string writer_;
  std::string text_;
};

// Writes a line to standard output, which the process that started this one reads.
inline void say(const std::string &line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// Another process of the example, killed unless it was waited for. Its standard input and output
// are pipes to this one.
class Process {
public:
  explicit Process(std::vector<std::string> words) : name_(words.at(2)) {
    int in[2], out[2];
    checked(pipe2(in, O_CLOEXEC), "pipe2");
    Descriptor in_read(in[0]), in_write(in[1]);
    checked(pipe2(out, O_CLOEXEC), "pipe2");
    Descriptor out_read(out[0]), out_write(out[1]);

    std::vector<char *> arguments;
    for (std::string &word : words)
      arguments.push_back(word.data());
    arguments.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in_read.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out_write.get(), STDOUT_FILENO);
    const int code =
        posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, arguments.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    ensure(code == 0, std::string("posix_spawn: ") + std::strerror(code));

    ended_ = Descriptor(checked(syscall(SYS_pidfd_open, pid_, 0), "pidfd_open"));
    input_ = std::move(in_write);
    output_ = Lines(dup_of(out_read), name_);
  }
  Process(Process &&other) noexcept
      : name_(std::move(other.name_)), pid_(std::exchange(other.pid_, 0)),
        ended_(std::move(other.ended_)), input_(std::move(other.input_)),
        output_(std::move(other.output_)) {}
  ~Process() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  pid_t pid() const { return pid_; }

  // Its next line.
  std::string hear() {
    const std::string line = output_.next();
    say(name_ + ": " + line);
    return line;
  }
  // Writes a line to its standard input.
  void tell(const std::string &line) {
    const std::string text = line + "\n";
    ensure(write(input_.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()),
           name_ + " does not read its standard input");
  }
  // Ends its standard input: it is asked to stop.
  void stop() { input_ = Descriptor(); }
  // Kills it with SIGKILL, and waits until it is dead.
  void kill() {
    checked(::kill(pid_, SIGKILL), "kill");
    const int status = wait();
    ensure(WIFSIGNALED(status), name_ + " ended before it was killed");
  }
  // Waits for its end, which has to be a good one.
  void finish() {
    const int status = wait();
    ensure(WIFEXITED(status) && WEXITSTATUS(status) == 0, name_ + " failed; its words are above");
  }

private:
  static int dup_of(const Descriptor &fd) {
    return checked(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0), "fcntl");
  }

  int wait() {
    ensure(ended_.is_readable(patience), name_ + " did not end");
    int status = 0;
    checked(waitpid(std::exchange(pid_, 0), &status, 0), "waitpid");
    return status;
  }

  std::string name_;
  pid_t pid_ = 0;
  Descriptor ended_, input_;
  Lines output_{-1};
};

// The role and the options of this process.
class Stage {
public:
  // With the roles that there are, and the options beside --device.
  Stage(int count, char **arguments, const std::vector<std::string> &roles,
        const std::vector<std::string> &options)
      : words_(arguments, arguments + count) {
    for (std::size_t at = 1; at < words_.size(); at += 2) {
      const auto is_in = [](const std::vector<std::string> &list, const std::string &word) {
        return std::find(list.begin(), list.end(), word) != list.end();
      };
      if (words_[at] != "--role" && words_[at] != "--device" && !is_in(options, words_[at]))
        throw Misuse("there is no option " + words_[at]);
      if (at + 1 == words_.size())
        throw Misuse(words_[at] + " needs a value");
      if (words_[at] == "--role" && !is_in(roles, words_[at + 1]))
        throw Misuse("there is no role " + words_[at + 1]);
    }
    std::signal(SIGPIPE, SIG_IGN);
    if (!role().empty()) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      return;
    }
    std::string folder = std::filesystem::temp_directory_path() / "warpipe-example-XXXXXX";
    ensure(mkdtemp(folder.data()) != nullptr, "mkdtemp: " + folder);
    folder_ = folder;
    setenv("WARPIPE_DOMAIN", folder.c_str(), 1); // also of the processes that this one starts
  }
  Stage(const Stage &) = delete;
  Stage &operator=(const Stage &) = delete;
  ~Stage() {
    std::error_code ignored;
    if (!folder_.empty())
      std::filesystem::remove_all(folder_, ignored);
  }

  // The part that this process plays; empty for the first one.
  std::string role() const { return option("--role", ""); }

  std::string option(const std::string &name, const std::string &otherwise) const {
    for (std::size_t at = 1; at + 1 < words_.size(); at++)
      if (words_[at] == name)
        return words_[at + 1];
    return otherwise;
  }
  std::uint64_t number(const std::string &name, std::uint64_t otherwise) const {
    const std::string text = option(name, std::to_string(otherwise));
    std::uint64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size())
      throw Misuse(name + " is a whole number, and not " + text);
    return number;
  }

  // --device host, cuda or cuda:1; by default the first GPU if there is one, else the host.
  warpipe::Device device() const {
    const std::string name = option("--device", "");
    return name.empty() ? warpipe::Device() : warpipe::Device(name);
  }

  // Starts a process that plays a role, with this one's options and others before them.
  Process start(const std::string &role, const std::vector<std::string> &options = {}) const {
    std::vector<std::string> words{words_.front(), "--role", role};
    words.insert(words.end(), options.begin(), options.end());
    words.insert(words.end(), words_.begin() + 1, words_.end());
    return Process(std::move(words));
  }

private:
  std::vector<std::string> words_;
  std::filesystem::path folder_;
};

// How an example is started: as its head says it, and what its processes accept.
struct Usage {
  std::string line;
  std::vector<std::string> roles;
  std::vector<std::string> options;
};

// Runs an example. Its result is the last line, behind "ok:" in the first process; an error goes to
// standard error, and the exit code is 1, or 2 for a mistake on the command line.
template <class Example>
int play(int count, char **arguments, const Usage &usage, Example example) {
  try {
    const Stage stage(count, arguments, usage.roles, usage.options);
    const std::string result = example(stage);
    say(stage.role().empty() ? "ok: " + result : result);
    return 0;
  } catch (const Misuse &misuse) {
    std::fprintf(stderr, "error: %s\nusage: %s\n", misuse.what(), usage.line.c_str());
    return 2;
  } catch (const std::exception &error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}

} // namespace stage

#endif
