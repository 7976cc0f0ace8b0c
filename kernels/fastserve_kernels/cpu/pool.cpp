#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace fastserve {
namespace {

// How long to spin before sleeping, in ticks of the time stamp counter: about 50 us, longer than the gap between two
// kernels and than most pieces; 5 us where others have work for the core. Never sched_yield: it puts the caller behind
// everybody else, for milliseconds.
constexpr uint64_t kSpinTicks = 130'000, kSpinTicksCrowded = 13'000;
constexpr unsigned kDenormalsAreZero = 0x8040;
constexpr uint32_t kOpen = 1u << 31;
constexpr uint32_t kCallerSleeps = 1u << 30;
constexpr uint32_t kCount = kCallerSleeps - 1;

void futex_wait(std::atomic<uint32_t>* word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Spins until `done` or until the time is up; says which.
template <class Done>
bool spin_until(uint64_t ticks, const Done& done) {
  const uint64_t start = __rdtsc();
  do {
    if (done()) return true;
    _mm_pause();
  } while (__rdtsc() - start < ticks);
  return done();
}

// One thread's share of the pieces. Its owner takes from it first, idle threads help afterwards.
struct alignas(64) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
};

}  // namespace

class Pool {
 public:
  Pool(int num_threads, bool is_crowded)
      : num_threads_(num_threads < 1 ? 1 : num_threads),
        spin_ticks_(is_crowded ? kSpinTicksCrowded : kSpinTicks),
        shares_(static_cast<size_t>(num_threads_)),
        scratch_(static_cast<size_t>(num_threads_ + kSharedSlots)) {
    try {
      for (int thread = 1; thread < num_threads_; ++thread) workers_.emplace_back([this, thread] { serve(thread); });
    } catch (const std::system_error&) {
      // A limit on threads is no reason to fail: the others take this one's share.
    }
  }

  ~Pool() {
    stopping_.store(true);
    announce();
    for (auto& worker : workers_) worker.join();
    for (auto& scratch : scratch_) std::free(scratch.data);
  }

  int num_threads() const { return num_threads_; }

  void run(int64_t count, int64_t grain, Body body, void* context) {
    const int64_t pieces = (count + grain - 1) / grain;
    for (int t = 0; t < num_threads_; ++t) {
      const int64_t end = pieces * (t + 1) / num_threads_ * grain;
      shares_[t].next.store(pieces * t / num_threads_ * grain, std::memory_order_relaxed);
      shares_[t].end = end < count ? end : count;
    }
    body_ = body;
    context_ = context;
    grain_ = grain;
    state_.store(kOpen, std::memory_order_release);
    announce();
    work(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    wait_for_workers();
  }

  void* scratch(int owner, size_t bytes) {
    Scratch& slot = scratch_[static_cast<size_t>(owner)];
    if (slot.bytes < bytes) {
      std::free(slot.data);
      slot.bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
      slot.data = std::aligned_alloc(4096, slot.bytes);
      if (slot.data == nullptr) std::abort();  // some MB; the weights and the KV cache were allocated long before
    }
    return slot.data;
  }

  std::mutex mutex;

 private:
  // Opens the eyes of the workers. The order (generation, then sleepers) mirrors the worker's (sleepers, then
  // generation), so that one of the two always sees the other.
  void announce() {
    generation_.fetch_add(1);
    if (sleepers_.load() > 0) futex_wake_all(&generation_);
  }

  void work(int thread) {
    for (int i = 0; i < num_threads_; ++i) {
      const int owner = thread + i < num_threads_ ? thread + i : thread + i - num_threads_;
      Share& share = shares_[owner];
      while (share.next.load(std::memory_order_relaxed) < share.end) {
        const int64_t begin = share.next.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= share.end) break;
        body_(context_, begin, begin + grain_ < share.end ? begin + grain_ : share.end, thread);
      }
    }
  }

  // The low bits of state_ (kCount) count the workers inside the job; only an open job lets one in, so that the caller may
  // reuse the job's fields as soon as the job is closed and the count is 0.
  bool enter() {
    uint32_t state = state_.load(std::memory_order_acquire);
    while (state & kOpen) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void leave() {
    const uint32_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
    if (before == (kCallerSleeps | 1)) futex_wake_all(&state_);
  }

  // For those inside their last piece.
  void wait_for_workers() {
    if (spin_until(spin_ticks_, [&] { return state_.load(std::memory_order_acquire) == 0; })) return;
    uint32_t state = state_.fetch_or(kCallerSleeps, std::memory_order_acq_rel) | kCallerSleeps;
    while (state & kCount) {
      futex_wait(&state_, state);
      state = state_.load(std::memory_order_acquire);
    }
  }

  void serve(int thread) {
    _mm_setcsr(_mm_getcsr() | kDenormalsAreZero);
    for (uint32_t seen = 0;;) {
      seen = wait_past(seen);
      if (stopping_.load()) return;
      if (!enter()) continue;
      work(thread);
      leave();
    }
  }

  uint32_t wait_past(uint32_t seen) {
    const auto moved_on = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    if (spin_until(spin_ticks_, moved_on)) return generation_.load();
    sleepers_.fetch_add(1);
    uint32_t now;
    while ((now = generation_.load()) == seen) futex_wait(&generation_, seen);
    sleepers_.fetch_sub(1);
    return now;
  }

  const int num_threads_;
  const uint64_t spin_ticks_;
  std::vector<Share> shares_;
  std::vector<Scratch> scratch_;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t grain_ = 1;
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

Pool* pool_create(int num_threads, bool is_crowded) { return new Pool(num_threads, is_crowded); }
void pool_destroy(Pool* pool) { delete pool; }
int pool_num_threads(const Pool* pool) { return pool->num_threads(); }
void pool_run(Pool* pool, int64_t count, int64_t grain, Body body, void* context) {
  pool->run(count, grain, body, context);
}
void* pool_scratch(Pool* pool, int owner, size_t bytes) { return pool->scratch(owner, bytes); }

Region::Region(Pool* pool) : pool_(pool) {
  pool_->mutex.lock();
  saved_mxcsr_ = _mm_getcsr();
  _mm_setcsr(saved_mxcsr_ | kDenormalsAreZero);
}

Region::~Region() {
  _mm_setcsr(saved_mxcsr_);
  pool_->mutex.unlock();
}

}  // namespace fastserve
