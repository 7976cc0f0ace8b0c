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
  F16 squares[4] = {zero(), zero(), zero(), zero()};
  int64_t whole = 0;
  for (; whole + 64 <= n; whole += 64) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const F16 v = load(x + whole + 16 * j);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for (int64_t i = whole; i < n; i += 16) {
    const F16 v = load_first(x + i, n - i);
    squares[0] = fma(v, v, squares[0]);
  }
  const float sum = reduce_add(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const F16 scale = splat(1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps));
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

// What becomes of the sums of one panel and some rows. The kind of output is a template parameter, and what is absent
// takes a neutral value: with a branch per vector this took as long as the products of a prompt.
template <class Out, bool Residual, bool Gated>
class PanelEnd {
 public:
  PanelEnd() = default;
  PanelEnd(const LinearArgs& args, int64_t panel) : a_(&args), column_(panel * (Gated ? kPanel / 2 : kPanel)) {
    for (int i = 0; i < 2; ++i) bias_[i] = args.bias == nullptr ? zero() : load(args.bias + panel * kPanel + 16 * i);
    floor_ = splat(args.activation == kRelu ? 0.0f : -__builtin_inff());
  }

  // sums: this panel's 32 of one row
  void write(int64_t row, const float* sums) const {
    constexpr int kVectors = Gated ? 1 : 2;
    const bool whole = column_ + kVectors * 16 <= a_->n;
    F16 v[2] = {add(load(sums), bias_[0]), add(load(sums + 16), bias_[1])};
    if constexpr (Gated) v[0] = mul(gate(v[0], a_->activation), v[1]);
    for (int i = 0; i < kVectors; ++i) {
      const int64_t column = column_ + 16 * i;
      if (!whole && column >= a_->n) break;
      finish(row, column, whole ? 16 : a_->n - column, v[i]);
    }
  }

 private:
  void finish(int64_t row, int64_t column, int64_t count, F16 v) const {
    v = max(floor_, v);  // of a NaN and the floor, the NaN
    if constexpr (Residual) v = add(v, load_first(a_->residual + row * a_->ld_residual + column, count));
    store_first(static_cast<Out*>(a_->out) + row * a_->ld_out + column, v, count);
  }

  const LinearArgs* a_ = nullptr;
  int64_t column_ = 0;
  F16 bias_[2], floor_;
};

// A block of rows whose sums are complete and are yet to be written out.
template <class End>
class Pending {
 public:
  void set(const End* ends, int panels, int64_t row, int rows, const float* sums) {
    ends_ = ends;
    panels_ = panels;
    row_ = row;
    left_ = rows;
    sums_ = sums;
  }

  void advance(int rows) {
    for (; rows > 0 && left_ > 0; --rows, --left_, ++row_) {
      for (int p = 0; p < panels_; ++p, sums_ += kPanel) ends_[p].write(row_, sums_);
    }
  }

  void finish() { advance(left_); }

 private:
  const End* ends_ = nullptr;
  int panels_ = 0, left_ = 0;
  int64_t row_ = 0;
  const float* sums_ = nullptr;
};

// As many rows as keep the inputs in the L2 cache while the panels pass by.
static inline int64_t rows_per_group(int64_t kp) {
  const int64_t fitting = (768 << 10) / (kp * 2) / 96 * 96;
  return fitting < 96 ? 96 : (fitting > 480 ? 480 : fitting);
}

// What block `index` of a panel's `num_blocks` asks for: its share of the next panel, so that memory is busy all the
// time. With a single block, which is done before its panel could arrive, the panel itself, one step ahead. Behind the
// last panel lies an address that is harmless to ask for.
static inline Ahead weights_ahead(const bf16* panel, int64_t kp, int64_t index, int64_t num_blocks) {
  if (num_blocks == 1) return {panel + kStep * kPanel, kStep, true};
  const int64_t lines = (kStep + num_blocks - 1) / num_blocks;
  return {panel + kPanel * kp + index * lines * kp, static_cast<int>(lines), false};
}

template <class End>
static void multiply(Pool* pool, const LinearArgs& a, const Input& input, int64_t kp) {
  const int64_t num_panels = is_gated(a.activation) ? round_up(a.n, 16) / 16 : round_up(a.n, kPanel) / kPanel;
  const int64_t group = rows_per_group(kp);
  for (int64_t row_begin = 0; row_begin < a.rows; row_begin += group) {
    const int64_t row_end = row_begin + group < a.rows ? row_begin + group : a.rows;
    parallel_for(pool, num_panels, 2, [&](int64_t begin, int64_t end, int) {
      BlockDot dots;
      Pending<End> pending;
      // One block is written out while the next is computed, be it of the same panel or of the next.
      alignas(64) float sums[2][32 * 2 * kPanel];
      End ends[2][2];
      int turn = 0, panel_turn = 0;
      const int width = BlockDot::panels(row_end - row_begin);
      for (int64_t panel = begin; panel < end; panel_turn ^= 1) {
        const int panels = end - panel >= width ? width : 1;
        for (int p = 0; p < panels; ++p) ends[panel_turn][p] = End(a, panel + p);
        const int64_t block = BlockDot::block_rows(panels);
        const int64_t num_blocks = (row_end - row_begin + block - 1) / block;
        for (int64_t row = row_begin; row < row_end; row += block, turn ^= 1) {
          const int rows = static_cast<int>(row_end - row < block ? row_end - row : block);
          const bf16* weight = a.weight + panel * kPanel * kp;
          const Ahead ahead = weights_ahead(weight, kp, (row - row_begin) / block, num_blocks);
          dots.run(input.x + row * input.ld, input.ld, rows, weight, panels, kp, ahead, pending, sums[turn]);
          pending.set(ends[panel_turn], panels, row, rows, sums[turn]);
        }
        panel += panels;
      }
      pending.finish();
    });
  }
}

static void linear(Pool* pool, const LinearArgs& a) {
  const int64_t kp = round_up(a.k, kStep);
  const Input input = prepare_input(pool, a, kp);
  const bool residual = a.residual != nullptr;
  if (is_gated(a.activation)) {
    if (a.out_is_float) return multiply<PanelEnd<float, false, true>>(pool, a, input, kp);
    return multiply<PanelEnd<bf16, false, true>>(pool, a, input, kp);
  }
  if (a.out_is_float && residual) return multiply<PanelEnd<float, true, false>>(pool, a, input, kp);
  if (a.out_is_float) return multiply<PanelEnd<float, false, false>>(pool, a, input, kp);
  if (residual) return multiply<PanelEnd<bf16, true, false>>(pool, a, input, kp);
  multiply<PanelEnd<bf16, false, false>>(pool, a, input, kp);
}

}  // namespace FS_ISA
}  // namespace fastserve
