// Where the ranks of one process meet: the last to arrive does the work of all, and nobody waits.
//
// A blocking barrier inside a handler exhausts XLA:CPU's thread pool at about 32 independent calls.
// Here each rank leaves its buffers and a callback and returns at once; the last one runs the
// round, and every rank's callback then runs on that rank's own completion thread (run inline they
// hang against XLA's collectives, which continue inside the callback). A watchdog ends an overdue
// round with the names of the ranks that never came.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"

namespace jax_pcie::cpu {

// Called once per rank and round: with nothing when the output is there, else with the reason.
using OnDone = std::function<void(const std::optional<std::string>& error)>;

// A round is one execution of one call instruction by one slice of the group.
struct RoundKey {
  int64_t call_site;
  int64_t run;
  int slice;
  auto operator<=>(const RoundKey&) const = default;
};

// What all ranks of a round must agree on. One program makes it so; a mismatch is an error and
// never a sum of two different arrays.
using CallFacts = std::array<int64_t, 4>;

// One thread a rank that runs callbacks in the order in which they were pushed.
class CompletionThreads {
 public:
  explicit CompletionThreads(int num_threads);
  ~CompletionThreads() { Stop(); }

  void Stop();  // runs what was pushed, then joins; not on one of these threads
  bool RunsOnThisThread() const;

  // Pushes one callback for each named thread under one lock, so that rounds never interleave.
  void Push(std::vector<std::pair<int, std::function<void()>>> callbacks);

 private:
  void Run(int index);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::deque<std::function<void()>>> queues_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

class Rendezvous {
 public:
  using Work = std::function<void(const std::vector<RankBuffers>&)>;

  Rendezvous(std::string name, int num_slices, int world_size, double timeout_s);
  ~Rendezvous() { Close(); }

  // Takes part in the round `key`; `work` runs once, by whichever rank completes the round. If it
  // throws, the round fails and the group is broken.
  void Arrive(RoundKey key, int rank, RankBuffers buffers, const CallFacts& facts, const Work& work,
              OnDone done);

  // Fails every round that has begun, and all calls from now on, with `reason`.
  void Break(const std::string& reason);

  // Throws on a thread that a program of the group runs on: there `Close` would wait for itself.
  void RequireClosable() const;

  // Fails what has begun, waits for work that runs now, and ends the threads.
  void Close();

  // The first failure, if there was one.
  std::optional<std::string> Broken() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Round {
    CallFacts facts;
    Clock::time_point deadline;
    std::vector<RankBuffers> buffers;  // [rank]
    std::vector<OnDone> done;          // [rank], empty until the rank has come
    int arrived = 0;
  };

  void Watch();
  void Run(const RoundKey& key, Round round, const Work& work);
  void Finish(const RoundKey& key, Round round, const std::optional<std::string>& error);
  std::string Overdue(const Round& round) const;

  const std::string name_;
  const int world_size_;
  const Clock::duration timeout_;
  mutable std::mutex mutex_;
  std::condition_variable wake_watchdog_, idle_;
  std::map<RoundKey, Round> rounds_;
  std::optional<std::string> broken_;
  int running_ = 0;  // rounds whose work runs, or whose callbacks are not pushed yet
  bool stopping_ = false;
  CompletionThreads completion_;
  std::thread watchdog_;
};

}  // namespace jax_pcie::cpu
