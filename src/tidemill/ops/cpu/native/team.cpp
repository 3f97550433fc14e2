// A worker that is late does not hold a product up: the caller takes stretches too, and waits only for workers that
// have begun one. Between products workers spin, then give their core away, then sleep.
#include "team.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace tidemill {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto spinning = std::chrono::microseconds(50);
constexpr auto yielding = std::chrono::microseconds(200);

void pause() {
#if defined(__aarch64__)
  asm volatile("isb");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Team {
 public:
  std::mutex busy;  // held by the caller the team works for

  void run(int64_t count, int64_t step, int32_t threads, const Work& work) {
    grow(threads - 1);
    work_ = &work;
    count_ = count;
    step_ = step;
    next_.store(0, std::memory_order_relaxed);
    seats_ = threads - 1;
    // A product's number in the high half, whether it is open and how many workers are at it in the low one.
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store(number << 32 | open, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst)) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    take_stretches();
    state_.fetch_and(~open, std::memory_order_acq_rel);
    for (int64_t tries = 0; state_.load(std::memory_order_acquire) & (open - 1); ++tries) {
      if (tries < 10000) pause();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr uint64_t open = uint64_t(1) << 31;

  void grow(int32_t workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {
      // Fewer threads do the same work.
    }
  }

  void take_stretches() {
    for (;;) {
      const int64_t first = next_.fetch_add(step_, std::memory_order_relaxed);
      if (first >= count_) return;
      (*work_)(first, first + step_ < count_ ? first + step_ : count_);
    }
  }

  void serve() {
    uint64_t done = 0;
    for (;;) {
      uint64_t state = wait(done);
      done = state >> 32;
      while (state & open && state >> 32 == done && int32_t(state & (open - 1)) < seats_.load()) {
        if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
        take_stretches();
        state_.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
    }
  }

  // The state once it is of a product after `done`.
  uint64_t wait(uint64_t done) {
    const auto start = Clock::now();
    for (int64_t tries = 1;; ++tries) {
      const uint64_t state = state_.load(std::memory_order_acquire);
      if (state >> 32 != done) return state;
      if (tries % 16) {
        pause();
        continue;
      }
      const auto waited = Clock::now() - start;
      if (waited > yielding) break;
      if (waited > spinning) std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return state_.load(std::memory_order_seq_cst) >> 32 != done; });
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    return state_.load(std::memory_order_acquire);
  }

  const Work* work_ = nullptr;
  int64_t count_ = 0;
  int64_t step_ = 1;
  int32_t workers_ = 0;
  std::atomic<int32_t> seats_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> state_{0};
  std::atomic<int32_t> sleeping_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

std::atomic<Team*> current{nullptr};

// Never taken down: its threads end with the process. A forked child has none of them, so it starts a team of its own.
Team& team() {
  static const int watched = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
  (void)watched;
  Team* found = current.load(std::memory_order_acquire);
  if (found) return *found;
  Team* fresh = new Team;
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

void share_out(int64_t count, int64_t step, int32_t threads, const Work& work) {
  if (threads > 1 && step < count) {
    Team& workers = team();
    std::unique_lock<std::mutex> lock(workers.busy, std::try_to_lock);
    if (lock.owns_lock()) return workers.run(count, step, threads, work);
  }
  work(0, count);
}

}  // namespace tidemill
