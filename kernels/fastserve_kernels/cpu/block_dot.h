// The inner product of a block of rows with one or two panels, with vector instructions.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

constexpr const char* kDotOrder = "pairs: odd, even";

class BlockDot {
 public:
  // Two panels at a time hide the latency of the dot when there are few rows.
  static int panels(int64_t rows) { return rows == 1 ? 2 : kTilePanels; }
  static int64_t block_rows(int panels) { return panels > kTilePanels ? 1 : kTileRows; }

  // sums[rows][panels * 32] = x[rows, kp] . panels[panels][kp / 2][32][2], summed along K in order from zero. The
  // hardware prefetches well enough for vector loads.
  template <class Pending>
  void run(const bf16* x, int64_t ld_x, int rows, const bf16* w, int panels, int64_t kp, Ahead /*ahead*/,
           Pending& pending, float* sums) {
    pending.finish();
    if (panels == 2) {
      rows_of<kTilePanels == 2 ? kTileRows : 1, 2>(x, ld_x, rows, w, kp, sums);
    } else {
      rows_of<kTileRows, 1>(x, ld_x, rows, w, kp, sums);
    }
  }

 private:
  template <int R, int P>
  static void rows_of(const bf16* x, int64_t ld_x, int rows, const bf16* w, int64_t kp, float* sums) {
    if (rows == R) return tile<R, P>(x, ld_x, w, kp, sums);
    if constexpr (R > 1) rows_of<R - 1, P>(x, ld_x, rows, w, kp, sums);
  }

  template <int R, int P>
  static void tile(const bf16* x, int64_t ld_x, const bf16* w, int64_t kp, float* sums) {
    F16 sum[R][2 * P];
    for (auto& row : sum)
      for (auto& v : row) v = zero();
    for (int64_t k = 0; k < kp; k += 2) {
      P16 weights[2 * P];
      for (int p = 0; p < P; ++p) {
        weights[2 * p] = load_pairs(w + p * kPanel * kp + k * kPanel);
        weights[2 * p + 1] = load_pairs(w + p * kPanel * kp + k * kPanel + 32);
      }
      for (int r = 0; r < R; ++r) {
        const P16 input = splat_pair(x + r * ld_x + k);
        for (int j = 0; j < 2 * P; ++j) sum[r][j] = dot(sum[r][j], input, weights[j]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 2 * P; ++j) store(sums + (r * 2 * P + j) * 16, sum[r][j]);
  }
};

}  // namespace FS_ISA
}  // namespace fastserve
