// Operations on rows: norms, gates, gathers, the largest of a row, copies of KV blocks.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

// Pieces of about 16,000 elements: below that, waking a second thread costs more than it brings.
static inline int64_t rows_per_piece(int64_t n) { return n >= 16384 ? 1 : 16384 / (n > 0 ? n : 1); }

static void rms_norm(Pool* pool, const RmsNormArgs& a) {
  parallel_for(pool, a.rows, rows_per_piece(a.n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const bf16* x = a.x + r * a.ld_x;
      if (a.residual != nullptr) {
        bf16* residual = a.residual + r * a.ld_residual;
        for (int64_t i = 0; i < a.n; i += 16) {
          store_first(residual + i, add(load_first(residual + i, a.n - i), load_first(x + i, a.n - i)), a.n - i);
        }
        x = residual;
      }
      rms_norm_row(x, a.weight, a.eps, a.out + r * a.ld_out, a.n);
    }
  });
}

static void gate_mul(Pool* pool, const GateMulArgs& a) {
  parallel_for(pool, a.rows, rows_per_piece(a.n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const bf16* x = a.gate + r * a.ld_gate;
      const bf16* up = a.up + r * a.ld_up;
      for (int64_t i = 0; i < a.n; i += 16) {
        const F16 y = mul(gate(load_first(x + i, a.n - i), a.activation), load_first(up + i, a.n - i));
        store_first(a.out + r * a.ld_out + i, y, a.n - i);
      }
    }
  });
}

// Row `row` of a packed [num_rows, n].
static inline void unpack_row(const bf16* packed, int64_t row, int64_t n, bf16* out) {
  const bf16* pairs = packed + row / kPanel * kPanel * round_up(n, kStep) + row % kPanel * 2;
  for (int64_t k = 0; k + 2 <= n; k += 2) __builtin_memcpy(out + k, pairs + k * kPanel, 2 * sizeof(bf16));
  if (n % 2 != 0) out[n - 1] = pairs[(n - 1) * kPanel];
}

static void embedding(Pool* pool, const EmbeddingArgs& a) {
  parallel_for(pool, a.num_ids, rows_per_piece(a.n), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = a.ids[t] - a.first_id;
      bf16* out = a.out + t * a.ld_out;
      if (row < 0 || row >= a.num_rows) {
        __builtin_memset(out, 0, static_cast<size_t>(a.n) * sizeof(bf16));
        continue;
      }
      if (a.ld_table == 0) {
        unpack_row(a.table, row, a.n, out);
      } else {
        __builtin_memcpy(out, a.table + row * a.ld_table, static_cast<size_t>(a.n) * sizeof(bf16));
      }
      if (a.scale == 1.0f) continue;
      for (int64_t i = 0; i < a.n; i += 16) {
        store_first(out + i, mul(load_first(out + i, a.n - i), splat(a.scale)), a.n - i);
      }
    }
  });
}

// Two passes, the first of which only compares whole vectors: at vocabulary length it runs at memory speed.
static inline int64_t argmax_row(const float* x, int64_t n) {
  F16 best = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const F16 v = load(x + i);
    if (any_nan(v)) return -1;
    best = max(best, v);
  }
  float largest = reduce_max(best);
  for (; i < n; ++i) {
    if (x[i] != x[i]) return -1;
    largest = x[i] > largest ? x[i] : largest;
  }
  if (__builtin_isinf(largest)) return -1;
  for (i = 0; x[i] != largest;) ++i;
  return i;
}

static void argmax(Pool* pool, const ArgmaxArgs& a) {
  parallel_for(pool, a.rows, rows_per_piece(a.n), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) a.out[r] = argmax_row(a.x + r * a.ld_x, a.n);
  });
}

static void copy_blocks(Pool* pool, const CopyBlocksArgs& a) {
  parallel_for(pool, a.num_pairs, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      __builtin_memcpy(a.target + a.pairs[2 * i + 1] * a.block_bytes, a.source + a.pairs[2 * i] * a.block_bytes,
                       static_cast<size_t>(a.block_bytes));
    }
  });
}

}  // namespace FS_ISA
}  // namespace fastserve
