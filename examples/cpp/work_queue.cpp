// A master hands 60 jobs to three workers, and one of them is killed while it works on one. The
// jobs that it held go to the others: each job has one result, and each result is right.
//
//   work_queue [--device host|cuda]

#include "stage.hpp"

#include <cmath>
#include <map>
#include <set>

using stage::ensure, stage::patience, stage::Process, stage::say, stage::Stage;

static constexpr std::size_t JOBS = 60, NUMBERS = 256, WORKERS = 3;
// The job that a worker with --stall does not finish, counted among its own.
static constexpr int STALLS_AT = 3;

static std::vector<float> numbers_of(std::size_t job) {
  std::vector<float> numbers(NUMBERS);
  for (std::size_t at = 0; at < NUMBERS; at++)
    numbers[at] = static_cast<float>(job * NUMBERS + at);
  return numbers;
}

static std::vector<float> roots_of(std::vector<float> numbers) {
  for (float &number : numbers)
    number = std::sqrt(number);
  return numbers;
}

// Works until the queue has closed.
static std::string work(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const warpipe::Stream stream(device);
  warpipe::WorkerOptions options;
  options.device = device.get();
  options.wait_ns = warpipe::nanoseconds(patience);
  warpipe::Worker worker("roots", options);
  const bool stalls = stage.number("--stall", 0) == 1;

  int done = 0;
  try {
    for (;;) {
      warpipe::Lease job = worker.lease(stream, patience);
      const std::vector<float> roots = roots_of(job.to_vector<float>(patience));
      if (stalls && done + 1 == STALLS_AT) {
        say("holds a job");
        stage::Lines(dup(STDIN_FILENO)).next(); // until it is killed
      }
      warpipe::Loan result = job.output(job.layout());
      result.write(stream, roots);
      job.complete(std::move(result), stream);
      done++;
    }
  } catch (const warpipe::PeerGone &gone) {
    ensure(gone.peer_closed(), gone.what());
  }
  stream.synchronize(patience);
  return std::to_string(done);
}

static std::string lead(const Stage &stage) {
  const warpipe::Device device = stage.device();
  const warpipe::Stream stream(device);
  warpipe::QueueOptions options;
  options.device = device.get();
  warpipe::Queue queue("roots", options);

  const auto layout = warpipe::Layout::contiguous<float>({NUMBERS});
  std::vector<warpipe::Job> jobs;
  for (std::size_t number = 0; number < JOBS; number++) {
    warpipe::Loan input = queue.loan(layout);
    input.write(stream, numbers_of(number));
    jobs.push_back(queue.submit(std::move(input), stream));
  }

  // The first worker is alone until it holds the job that it does not finish.
  std::vector<Process> workers;
  workers.push_back(stage.start("worker", {"--stall", "1"}));
  workers[0].hear();
  for (std::size_t number = 1; number < WORKERS; number++)
    workers.push_back(stage.start("worker"));
  queue.wait_for_workers(WORKERS, patience);
  const pid_t killed = workers[0].pid();
  workers[0].kill();

  std::set<std::uint64_t> answered;
  std::map<pid_t, int> done_by;
  int tried_again = 0;
  for (std::size_t number = 0; number < JOBS; number++) {
    const warpipe::Sample result = jobs[number].wait(stream, patience);
    ensure(result.to_vector<float>(patience) == roots_of(numbers_of(number)), "a result is wrong");
    ensure(answered.insert(result.info().job).second, "a job has two results");
    done_by[result.info().pid]++;
    tried_again += result.info().attempt > 1;
  }
  ensure(answered.size() == JOBS && tried_again > 0, "the killed worker's job was not tried again");
  queue.shutdown(patience);
  for (std::size_t number = 1; number < WORKERS; number++) {
    const std::string done = workers[number].hear();
    ensure(done == std::to_string(done_by[workers[number].pid()]), "a worker did work in vain");
    workers[number].finish();
  }
  return std::to_string(JOBS) + " jobs, each done once: " + std::to_string(done_by[killed]) +
         " by the worker that was killed, and " + std::to_string(tried_again) +
         " that it held by the others";
}

static const stage::Usage USAGE{"work_queue [--device host|cuda]", {"worker"}, {"--stall"}};

int main(int count, char **arguments) {
  return stage::play(count, arguments, USAGE, [](const Stage &stage) {
    return stage.role() == "worker" ? work(stage) : lead(stage);
  });
}
