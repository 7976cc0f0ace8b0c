// The two products of attention for a few query rows and up to 4 pages of 16 tokens, with vector instructions.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

constexpr int kPages = 4;  // in a superblock
constexpr int kSuperblock = kPages * kPageTokens;

class AttentionDot {
 public:
  static constexpr int kRows = kTilePanels == 2 ? kTileRows : 1;

  AttentionDot(int rows, int64_t head_dim) : rows_(rows), head_dim_(head_dim) {}

  // scores[rows][64] = q[rows, head_dim] . k; of pages that are not there, some finite or infinite value
  void scores(const bf16* q, const bf16* const* pages, int num_pages, float* scores) const {
    const bf16* k[kPages];
    for (int p = 0; p < kPages; ++p) k[p] = pages[p < num_pages ? p : 0];
    rows_of<kRows>([&](auto rows) { score_tile<rows()>(q, k, scores); });
  }

  // sums[rows][head_dim] += weights[rows][64] . v
  void accumulate(const bf16* weights, const bf16* const* pages, int num_pages, float* sums) const {
    for (int64_t d = 0; d < head_dim_; d += 64) {
      if (head_dim_ - d >= 64) {
        rows_of<kRows>([&](auto rows) { sum_tile<rows(), 4>(weights, pages, num_pages, d, sums); });
      } else {
        for (int64_t e = d; e < head_dim_; e += 16) {
          rows_of<kRows>([&](auto rows) { sum_tile<rows(), 1>(weights, pages, num_pages, e, sums); });
        }
      }
    }
  }

 private:
  template <int R>
  struct Rows {
    constexpr int operator()() const { return R; }
  };

  template <int R, class F>
  void rows_of(const F& tile) const {
    if (rows_ == R) return tile(Rows<R>{});
    if constexpr (R > 1) rows_of<R - 1>(tile);
  }

  template <int R>
  void score_tile(const bf16* q, const bf16* const* k, float* scores) const {
    F16 sum[R][kPages];
    for (auto& row : sum)
      for (auto& v : row) v = zero();
    for (int64_t d = 0; d < head_dim_; d += 2) {
      for (int p = 0; p < kPages; ++p) {
        const P16 keys = load_pairs(k[p] + d * kPageTokens);
        for (int r = 0; r < R; ++r) sum[r][p] = dot(sum[r][p], splat_pair(q + r * head_dim_ + d), keys);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < kPages; ++p) store(scores + r * kSuperblock + p * kPageTokens, sum[r][p]);
  }

  template <int R, int V>
  void sum_tile(const bf16* weights, const bf16* const* pages, int num_pages, int64_t d, float* sums) const {
    F16 sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) sum[r][j] = load(sums + r * head_dim_ + d + 16 * j);
    for (int p = 0; p < num_pages; ++p) {
      for (int t = 0; t < kPageTokens; t += 2) {
        const bf16* row = pages[p] + (t * head_dim_ + 2 * d);
        P16 values[V];
        for (int j = 0; j < V; ++j) values[j] = load_pairs(row + 32 * j);
        for (int r = 0; r < R; ++r) {
          const P16 weight = splat_pair(weights + r * kSuperblock + p * kPageTokens + t);
          for (int j = 0; j < V; ++j) sum[r][j] = dot(sum[r][j], weight, values[j]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < V; ++j) store(sums + r * head_dim_ + d + 16 * j, sum[r][j]);
  }

  const int rows_;
  const int64_t head_dim_;
};

}  // namespace FS_ISA
}  // namespace fastserve
