// Sums and gathers among the processes of one node, through memory they share.
//
// The segment: one cache line per rank that counts its arrivals, then two buffers of one slot per rank. A call
// writes the rank's slot, announces it, waits for the others and reads their slots. The buffers alternate between
// calls: who writes a buffer again has seen every rank arrive at the call between, so nobody still reads it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

class SharedCall {
 public:
  explicit SharedCall(SharedGroup& group)
      : g_(group),
        buffer_(g_.segment + g_.num_ranks * 64 + (g_.num_calls++ & 1) * g_.num_ranks * g_.slot_bytes) {}

  uint8_t* slot(int64_t rank) const { return buffer_ + rank * g_.slot_bytes; }

  // Returns when every rank has called it as often as this one.
  void meet() {
    const uint32_t target = ++g_.num_arrivals;
    Arrivals& own = arrivals(g_.rank);
    __atomic_store_n(&own.count, target, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own.sleepers, __ATOMIC_SEQ_CST) > 0) futex(&own.count, FUTEX_WAKE, INT_MAX);
    for (int64_t rank = 0; rank < g_.num_ranks; ++rank) wait(arrivals(rank), target, g_.num_looks);
  }

 private:
  // One cache line of the segment. Counts wrap around; two ranks are never more than one call apart.
  struct Arrivals {
    uint32_t count;
    uint32_t sleepers;
  };

  Arrivals& arrivals(int64_t rank) const { return *reinterpret_cast<Arrivals*>(g_.segment + rank * 64); }

  static void futex(uint32_t* word, int operation, uint32_t value) {
    syscall(SYS_futex, word, operation, value, nullptr, nullptr, 0);
  }

  static void wait(Arrivals& other, uint32_t target, int64_t num_looks) {
    const auto behind = [&](uint32_t count) { return static_cast<int32_t>(count - target) < 0; };
    for (int64_t i = 0; i < num_looks; ++i) {
      if (!behind(__atomic_load_n(&other.count, __ATOMIC_ACQUIRE))) return;
      _mm_pause();
    }
    // Sleeping hands the core to a rank that has none; yielding would put this one behind everybody else.
    __atomic_fetch_add(&other.sleepers, 1, __ATOMIC_SEQ_CST);
    for (uint32_t count; behind(count = __atomic_load_n(&other.count, __ATOMIC_SEQ_CST));) {
      futex(&other.count, FUTEX_WAIT, count);
    }
    __atomic_fetch_sub(&other.sleepers, 1, __ATOMIC_SEQ_CST);
  }

  SharedGroup& g_;
  uint8_t* buffer_;
};

// out[0..] = the sums of elements begin..end-1.
template <class T>
static inline void sum_slots(const SharedCall& call, int64_t num_ranks, int64_t begin, int64_t end, T* out) {
  for (int64_t i = begin; i < end; i += 16) {
    F16 sum = zero();
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      sum = add(sum, load_first(reinterpret_cast<const T*>(call.slot(rank)) + i, end - i));
    }
    store_first(out + i - begin, sum, end - i);
  }
}

// Large sums are shared out: each rank adds one part and all read the parts. The result is the same either way.
// For less than this, from all ranks together, meeting once more costs more than every rank's adding all.
constexpr int64_t kShareOut = 512 << 10;

template <class T>
static void all_reduce_piece(SharedGroup& group, T* x, int64_t n) {
  SharedCall call(group);
  const size_t bytes = static_cast<size_t>(n) * sizeof(T);
  __builtin_memcpy(call.slot(group.rank), x, bytes);
  call.meet();
  if (static_cast<int64_t>(bytes) * group.num_ranks < kShareOut) return sum_slots(call, group.num_ranks, 0, n, x);

  const auto part = [&](int64_t rank) { return n / 16 * rank / group.num_ranks * 16; };
  const auto part_end = [&](int64_t rank) { return rank + 1 == group.num_ranks ? n : part(rank + 1); };
  // Nobody else reads this rank's part of this rank's slot.
  sum_slots(call, group.num_ranks, part(group.rank), part_end(group.rank),
            reinterpret_cast<T*>(call.slot(group.rank)) + part(group.rank));
  call.meet();
  for (int64_t rank = 0; rank < group.num_ranks; ++rank) {
    const T* sums = reinterpret_cast<const T*>(call.slot(rank));
    __builtin_memcpy(x + part(rank), sums + part(rank), static_cast<size_t>(part_end(rank) - part(rank)) * sizeof(T));
  }
}

template <class T>
static void all_reduce_pieces(SharedGroup& group, T* x, int64_t n) {
  const int64_t piece = group.slot_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; i += piece) all_reduce_piece(group, x + i, n - i < piece ? n - i : piece);
}

static void all_reduce(Pool*, const AllReduceArgs& a) {
  if (a.is_float) {
    all_reduce_pieces(*a.group, static_cast<float*>(a.x), a.n);
  } else {
    all_reduce_pieces(*a.group, static_cast<bf16*>(a.x), a.n);
  }
}

static void all_gather(Pool*, const AllGatherArgs& a) {
  SharedGroup& group = *a.group;
  const int64_t width = a.row_bytes < group.slot_bytes ? a.row_bytes : group.slot_bytes;
  const int64_t rows_at_once = width > 0 ? group.slot_bytes / width : 1;
  for (int64_t row = 0; row < a.rows; row += rows_at_once) {
    const int64_t rows = a.rows - row < rows_at_once ? a.rows - row : rows_at_once;
    for (int64_t column = 0; column < a.row_bytes; column += width) {
      const int64_t bytes = a.row_bytes - column < width ? a.row_bytes - column : width;
      SharedCall call(group);
      const auto copy = [&](uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride) {
        for (int64_t r = 0; r < rows; ++r) {
          __builtin_memcpy(to + r * to_stride, from + r * from_stride, static_cast<size_t>(bytes));
        }
      };
      copy(call.slot(group.rank), bytes, a.x + row * a.row_bytes + column, a.row_bytes);
      call.meet();
      if (a.out == nullptr) continue;
      const int64_t out_stride = group.num_ranks * a.row_bytes;
      for (int64_t rank = 0; rank < group.num_ranks; ++rank) {
        copy(a.out + row * out_stride + rank * a.row_bytes + column, out_stride, call.slot(rank), bytes);
      }
    }
  }
}

}  // namespace FS_ISA
}  // namespace fastserve
