// Rounds, the watchdog that ends overdue ones, and the threads on which ranks are called back.
#include "rendezvous.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "../peer_group.h"
#include "float_environment.h"

namespace jax_pcie::cpu {

CompletionThreads::CompletionThreads(int num_threads) : queues_(num_threads) {
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this, i] { Run(i); });
  } catch (const std::exception& failure) {
    Stop();
    throw Error(Concat("a group of ", num_threads, " devices needs as many threads, and only ",
                       threads_.size(), " could be made: ", failure.what()));
  }
}

void CompletionThreads::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

bool CompletionThreads::RunsOnThisThread() const {
  const auto is_this = [](const std::thread& t) {
    return t.get_id() == std::this_thread::get_id();
  };
  return std::any_of(threads_.begin(), threads_.end(), is_this);
}

void CompletionThreads::Push(std::vector<std::pair<int, std::function<void()>>> callbacks) {
  {
    std::lock_guard lock(mutex_);
    for (auto& [index, callback] : callbacks) queues_[index].push_back(std::move(callback));
  }
  wake_.notify_all();
}

void CompletionThreads::Run(int index) {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || !queues_[index].empty(); });
    if (queues_[index].empty()) return;
    const std::function<void()> callback = std::move(queues_[index].front());
    queues_[index].pop_front();
    lock.unlock();
    callback();
    lock.lock();
  }
}

Rendezvous::Rendezvous(std::string name, int num_slices, int world_size, double timeout_s)
    : name_(std::move(name)),
      world_size_(world_size),
      timeout_(
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))),
      completion_(num_slices * world_size),
      watchdog_([this] { Watch(); }) {}

void Rendezvous::RequireClosable() const {
  Require(!completion_.RunsOnThisThread(), name_, " cannot be closed by a program that uses it");
}

void Rendezvous::Close() {
  Break(Concat(name_, " is closed"));
  {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return running_ == 0; });
    stopping_ = true;
  }
  wake_watchdog_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  completion_.Stop();
}

void Rendezvous::Arrive(RoundKey key, int rank, RankBuffers buffers, const CallFacts& facts,
                        const Work& work, OnDone done) {
  std::optional<std::string> mismatch;
  Round complete;
  {
    std::lock_guard lock(mutex_);
    if (broken_) throw Error(BrokenGroup(*broken_));
    Round& round = rounds_[key];
    if (round.arrived == 0) {
      round.facts = facts;
      round.deadline = Clock::now() + timeout_;
      round.buffers.resize(world_size_);
      round.done.resize(world_size_);
      wake_watchdog_.notify_one();
    }
    if (round.done[rank]) {
      mismatch = Concat(name_, ": rank ", rank, " came twice to one call");
    } else if (round.facts != facts) {
      mismatch = Concat(name_, ": rank ", rank, " brought ", facts[0],
                        " values or bytes to a call that others made with ", round.facts[0],
                        ", or another type or rule: all ranks must run the same program");
    } else {
      round.buffers[rank] = std::move(buffers);
      round.done[rank] = [done = std::move(done), control = FloatControl::OfThisThread()](
                             const std::optional<std::string>& failure) {
        const FloatScope as_where_it_came_from(control);
        done(failure);
      };
      if (++round.arrived < world_size_) return;
      complete = std::move(round);
      rounds_.erase(key);
      ++running_;
    }
  }
  if (mismatch) {
    Break(*mismatch);
    throw Error(*mismatch);
  }
  Run(key, std::move(complete), work);
}

void Rendezvous::Run(const RoundKey& key, Round round, const Work& work) {
  std::optional<std::string> error;
  {
    const FloatScope keep_subnormals(FloatControl::Standard());
    try {
      work(round.buffers);
    } catch (const std::exception& failure) {
      error = Concat(name_, ": ", failure.what());
    } catch (...) {
      error = Concat(name_, ": the work of a round failed");
    }
  }
  if (error) Break(*error);
  Finish(key, std::move(round), error);
  std::lock_guard lock(mutex_);
  if (--running_ == 0) idle_.notify_all();
}

void Rendezvous::Finish(const RoundKey& key, Round round, const std::optional<std::string>& error) {
  std::vector<std::pair<int, std::function<void()>>> callbacks;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (!round.done[rank]) continue;
    callbacks.emplace_back(key.slice * world_size_ + rank,
                           [done = std::move(round.done[rank]), error] { done(error); });
  }
  completion_.Push(std::move(callbacks));
}

void Rendezvous::Break(const std::string& reason) {
  std::map<RoundKey, Round> pending;
  {
    std::lock_guard lock(mutex_);
    if (!broken_) broken_ = reason;
    pending.swap(rounds_);
  }
  for (auto& [key, round] : pending) Finish(key, std::move(round), reason);
}

std::optional<std::string> Rendezvous::Broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

std::string Rendezvous::Overdue(const Round& round) const {
  std::string came, missing;
  for (int rank = 0; rank < world_size_; ++rank) {
    (round.done[rank] ? came : missing) += Concat(" ", rank);
  }
  const double waited = std::chrono::duration<double>(timeout_).count();
  return Concat(name_, ": ranks", came, " waited ", waited, " s; missing ranks:", missing,
                ". Every rank must reach every collective of its group");
}

void Rendezvous::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    std::optional<Clock::time_point> next;
    for (const auto& [key, round] : rounds_) {
      if (!next || round.deadline < *next) next = round.deadline;
    }
    if (!next) {
      wake_watchdog_.wait(lock);
      continue;
    }
    if (wake_watchdog_.wait_until(lock, *next) == std::cv_status::no_timeout) continue;
    for (const auto& [key, round] : rounds_) {
      if (round.deadline > Clock::now()) continue;
      const std::string reason = Overdue(round);
      lock.unlock();
      Break(reason);  // one missing rank stops the whole group: its other rounds cannot end either
      lock.lock();
      break;
    }
  }
}

}  // namespace jax_pcie::cpu
