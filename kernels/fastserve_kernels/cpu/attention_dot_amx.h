// The two products of attention for up to 16 query rows and up to 4 pages of 16 tokens, with AMX tiles.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

constexpr int kPages = 4;  // in a superblock
constexpr int kSuperblock = kPages * kPageTokens;

class AttentionDot {
 public:
  static constexpr int kRows = 16;

  // Tiles 0..3: sums; 4 x 5: a step of 32 (of head_dim); 6 x 7: a step of 16 (of tokens, or the end of head_dim).
  AttentionDot(int rows, int64_t head_dim) : head_dim_(head_dim) {
    TileConfig config;
    for (int tile = 0; tile < 4; ++tile) config.set(tile, rows, 64);
    config.set(4, rows, 64);
    config.set(5, 16, 64);
    config.set(6, rows, 32);
    config.set(7, 8, 64);
    config.load();
  }

  ~AttentionDot() { _tile_release(); }
  AttentionDot(const AttentionDot&) = delete;

  // scores[rows][64] = q[rows, head_dim] . k; of pages that are not there, some finite or infinite value
  void scores(const bf16* q, const bf16* const* pages, int num_pages, float* scores) const {
    const bf16* k[kPages];
    for (int p = 0; p < kPages; ++p) k[p] = pages[p < num_pages ? p : 0];
    memory_is_read();
    clear();
    int64_t d = 0;
    for (; d + 32 <= head_dim_; d += 32) {
      _tile_loadd(4, q + d, head_dim_ * 2);
      _tile_loadd(5, k[0] + d * kPageTokens, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, k[1] + d * kPageTokens, 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, k[2] + d * kPageTokens, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, k[3] + d * kPageTokens, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    if (d < head_dim_) {
      _tile_loadd(6, q + d, head_dim_ * 2);
      _tile_loadd(7, k[0] + d * kPageTokens, 64);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, k[1] + d * kPageTokens, 64);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, k[2] + d * kPageTokens, 64);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, k[3] + d * kPageTokens, 64);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, scores, kSuperblock * 4);
    _tile_stored(1, scores + 16, kSuperblock * 4);
    _tile_stored(2, scores + 32, kSuperblock * 4);
    _tile_stored(3, scores + 48, kSuperblock * 4);
  }

  // sums[rows][head_dim] += weights[rows][64] . v
  void accumulate(const bf16* weights, const bf16* const* pages, int num_pages, float* sums) const {
    memory_is_read();
    int64_t d = 0;
    for (; d + 64 <= head_dim_; d += 64) {
      const int64_t stride = head_dim_ * 4;
      _tile_loadd(0, sums + d, stride);
      _tile_loadd(1, sums + d + 16, stride);
      _tile_loadd(2, sums + d + 32, stride);
      _tile_loadd(3, sums + d + 48, stride);
      for (int p = 0; p < num_pages; ++p) {
        const bf16* v = pages[p] + 2 * d;
        _tile_loadd(6, weights + p * kPageTokens, kSuperblock * 2);
        _tile_loadd(7, v, stride);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, v + 32, stride);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, v + 64, stride);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, v + 96, stride);
        _tile_dpbf16ps(3, 6, 7);
      }
      _tile_stored(0, sums + d, stride);
      _tile_stored(1, sums + d + 16, stride);
      _tile_stored(2, sums + d + 32, stride);
      _tile_stored(3, sums + d + 48, stride);
    }
    for (; d < head_dim_; d += 16) {
      _tile_loadd(0, sums + d, head_dim_ * 4);
      for (int p = 0; p < num_pages; ++p) {
        _tile_loadd(6, weights + p * kPageTokens, kSuperblock * 2);
        _tile_loadd(7, pages[p] + 2 * d, head_dim_ * 4);
        _tile_dpbf16ps(0, 6, 7);
      }
      _tile_stored(0, sums + d, head_dim_ * 4);
    }
  }

 private:
  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  const int64_t head_dim_;
};

}  // namespace FS_ISA
}  // namespace fastserve
