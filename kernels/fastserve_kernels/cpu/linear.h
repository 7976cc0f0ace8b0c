// y = activation(rms_norm(x) W^T + bias) + residual for packed bf16 weights and any number of rows.
//
// A row's result depends on that row and the weight alone: one accumulator per output runs along all of K in a fixed
// order, whatever the number of rows, the blocking and the thread.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

// out = x / rms(x) * weight, rounded once; n floats of weight. `out` may be x.
template <class T>
static inline void rms_norm_row(const T* x, const float* weight, float eps, T* out, int64_t n) {
  F16 squares = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const F16 v = load_first(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F16 scale = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps));
  for (int64_t i = 0; i < n; i += 16) {
    const F16 v = mul(mul(load_first(x + i, n - i), scale), load_first(weight + i, n - i));
    store_first(out + i, v, n - i);
  }
}

// The rows the dots read: normalised, and with K a multiple of 32, in scratch memory where the caller's are not.
struct Input {
  const bf16* x;
  int64_t ld;
};

static Input prepare_input(Pool* pool, const LinearArgs& a, int64_t kp) {
  if (a.norm_weight == nullptr && a.k == kp) return {a.x, a.ld_x};
  bf16* rows = shared_scratch<bf16>(pool, 0, a.rows * kp);
  parallel_for(pool, a.rows, 8, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      bf16* row = rows + r * kp;
      if (a.norm_weight != nullptr) {
        rms_norm_row(a.x + r * a.ld_x, a.norm_weight, a.eps, row, a.k);
      } else {
        __builtin_memcpy(row, a.x + r * a.ld_x, static_cast<size_t>(a.k) * sizeof(bf16));
      }
      for (int64_t k = a.k; k < kp; ++k) row[k] = 0;
    }
  });
  return {rows, kp};
}

static inline bool is_gated(int32_t activation) { return activation == kSiluMul || activation == kGeluTanhMul; }

// Writes up to 16 finished values of one row, columns [col, col + 16).
static inline void write_outputs(const LinearArgs& a, int64_t row, int64_t col, F16 v) {
  const int64_t left = a.n - col;
  if (a.activation == kRelu) v = max(v, zero());
  if (a.residual != nullptr) v = add(v, load_first(a.residual + row * a.ld_residual + col, left));
  if (a.out_is_float) {
    store_first(static_cast<float*>(a.out) + row * a.ld_out + col, v, left);
  } else {
    store_first(static_cast<bf16*>(a.out) + row * a.ld_out + col, v, left);
  }
}

// acc: the 32 sums of one row and panel.
static inline void finish_panel(const LinearArgs& a, int64_t row, int64_t panel, const float* acc) {
  F16 first = load(acc), second = load(acc + 16);
  if (a.bias != nullptr) {
    first = add(first, load(a.bias + panel * kPanel));
    second = add(second, load(a.bias + panel * kPanel + 16));
  }
  if (is_gated(a.activation)) return write_outputs(a, row, panel * 16, mul(gate(first, a.activation), second));
  write_outputs(a, row, panel * kPanel, first);
  if (panel * kPanel + 16 < a.n) write_outputs(a, row, panel * kPanel + 16, second);
}

// As many rows as keep the inputs in the L2 cache while the panels pass by.
static inline int64_t rows_per_group(int64_t kp) {
  const int64_t fitting = (768 << 10) / (kp * 2) / 96 * 96;
  return fitting < 96 ? 96 : (fitting > 480 ? 480 : fitting);
}

static void linear(Pool* pool, const LinearArgs& a) {
  const int64_t kp = round_up(a.k, kStep);
  const Input input = prepare_input(pool, a, kp);
  const int64_t num_panels = is_gated(a.activation) ? round_up(a.n, 16) / 16 : round_up(a.n, kPanel) / kPanel;
  const int64_t group = rows_per_group(kp);
  const int64_t num_groups = (a.rows + group - 1) / group;
  // Pieces of two panels; a piece never spans two row groups because the groups are separate calls.
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t row_begin = g * group;
    const int64_t row_end = row_begin + group < a.rows ? row_begin + group : a.rows;
    parallel_for(pool, num_panels, 2, [&](int64_t begin, int64_t end, int) {
      BlockDot dots;
      const int width = BlockDot::panels(row_end - row_begin);
      for (int64_t panel = begin; panel < end;) {
        const int panels = end - panel >= width ? width : 1;
        const int64_t block = BlockDot::block_rows(panels);
        for (int64_t row = row_begin; row < row_end; row += block) {
          const int rows = static_cast<int>(row_end - row < block ? row_end - row : block);
          alignas(64) float acc[32 * 2 * kPanel];
          dots.run(input.x + row * input.ld, input.ld, rows, a.weight + panel * kPanel * kp, panels, kp,
                   row == row_begin, acc);
          for (int r = 0; r < rows; ++r)
            for (int p = 0; p < panels; ++p) finish_panel(a, row + r, panel + p, acc + (r * panels + p) * kPanel);
        }
        panel += panels;
      }
    });
  }
}

}  // namespace FS_ISA
}  // namespace fastserve
