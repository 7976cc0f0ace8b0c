// A fork-join thread pool for kernels of a few microseconds.
//
// Two rules shape it. The caller never waits for a worker that has not started: work is claimed in small pieces,
// so a worker that sleeps, or whose core is taken by a neighbour, costs its share of speed and not a stall. And
// nobody spins for long: whoever waits spins for some microseconds, then sleeps on a futex.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fastserve {

class Pool;

using Body = void (*)(void* context, int64_t begin, int64_t end, int thread);

// `num_threads` counts the caller. Never fails: threads that cannot be started are done without. `is_crowded`: other
// processes compute on these cores, too, so that spinning takes from them.
Pool* pool_create(int num_threads, bool is_crowded);
void pool_destroy(Pool* pool);
int pool_num_threads(const Pool* pool);

// Calls body on pieces of [0, count), each at most `grain` long, on several threads, until all are done.
void pool_run(Pool* pool, int64_t count, int64_t grain, Body body, void* context);

// Memory of at least `bytes`, aligned to 64, whose content lasts until the next request of the same owner.
// Owners 0..num_threads-1 are the threads; those from num_threads on are the kSharedSlots of the calling thread.
void* pool_scratch(Pool* pool, int owner, size_t bytes);
constexpr int kSharedSlots = 8;

// Held by every kernel from entry to exit: one caller at a time, and denormals are zero for the calling thread, as
// the bf16 dot instructions define it (the workers run so always).
class Region {
 public:
  explicit Region(Pool* pool);
  ~Region();
  Region(const Region&) = delete;

 private:
  Pool* pool_;
  unsigned saved_mxcsr_;
};

// Internal linkage: each instruction set's file keeps its own copy, none may be shared by the linker.
template <class F>
static inline void parallel_for(Pool* pool, int64_t count, int64_t grain, const F& body) {
  if (count <= grain || pool_num_threads(pool) == 1) {
    if (count > 0) body(int64_t{0}, count, 0);
    return;
  }
  struct Call {
    static void run(void* f, int64_t begin, int64_t end, int thread) {
      (*static_cast<const F*>(f))(begin, end, thread);
    }
  };
  pool_run(pool, count, grain, &Call::run, const_cast<F*>(&body));
}

template <class T>
static inline T* shared_scratch(Pool* pool, int slot, int64_t count) {
  return static_cast<T*>(pool_scratch(pool, pool_num_threads(pool) + slot, static_cast<size_t>(count) * sizeof(T)));
}

template <class T>
static inline T* thread_scratch(Pool* pool, int thread, int64_t count) {
  return static_cast<T*>(pool_scratch(pool, thread, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace fastserve
