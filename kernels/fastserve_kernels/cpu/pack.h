// Weights into the layout of abi.h, by the calling thread alone: those who load weights do it on several threads.
#pragma once

#include <emmintrin.h>

#include "abi.h"

namespace fastserve {

constexpr int64_t kLanes = 16;  // outputs packed at once: a cache line of a panel's step

// out[i][j] = rows[j][i], pairs of bf16.
static inline void transpose_4x4(const bf16* rows, int64_t ld, __m128i* out, int64_t out_stride) {
  const auto load = [&](int64_t j) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + j * ld)); };
  const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
  const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
  const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
  out[0 * out_stride] = _mm_unpacklo_epi64(ab_low, cd_low);
  out[1 * out_stride] = _mm_unpackhi_epi64(ab_low, cd_low);
  out[2 * out_stride] = _mm_unpacklo_epi64(ab_high, cd_high);
  out[3 * out_stride] = _mm_unpackhi_epi64(ab_high, cd_high);
}

// 16 rows of kStep numbers, so that each line of either side is touched once. The lines that are written are not read
// soon: they go past the caches.
static inline void pack_step(const bf16* rows, int64_t ld, bf16* packed) {
  constexpr int64_t kQuarters = kLanes / 4, kPairs = kStep / 2;
  alignas(64) __m128i tile[kPairs * kQuarters];
  for (int64_t j = 0; j < kQuarters; ++j) {
    for (int64_t i = 0; i < kPairs; i += 4) {
      transpose_4x4(rows + 4 * j * ld + 2 * i, ld, tile + i * kQuarters + j, kQuarters);
    }
  }
  for (int64_t i = 0; i < kPairs; ++i) {
    auto* line = reinterpret_cast<__m128i*>(packed + i * kPanel * 2);
    for (int64_t j = 0; j < kQuarters; ++j) _mm_stream_si128(line + j, tile[i * kQuarters + j]);
  }
}

static inline void pack_numbers(const bf16* row, int64_t begin, int64_t end, bf16* packed) {
  for (int64_t k = begin; k < end; ++k) packed[k / 2 * kPanel * 2 + k % 2] = row[k];
}

static inline void pack(const PackArgs& a) {
  const int64_t kp = round_up(a.k, kStep), whole_k = a.k / kStep * kStep;
  for (int64_t i = 0; i < a.num_rows;) {
    const int64_t output = a.first + i, lane = a.lane + output % a.per_panel;
    const bf16* rows = a.rows + i * a.ld_rows;
    bf16* packed = a.packed + output / a.per_panel * kPanel * kp + lane * 2;
    const bool is_line = lane % kLanes == 0 && i + kLanes <= a.num_rows;
    const int64_t count = is_line ? kLanes : 1;
    if (is_line) {
      for (int64_t k = 0; k < whole_k; k += kStep) pack_step(rows + k, a.ld_rows, packed + k * kPanel);
    }
    for (int64_t j = 0; j < count; ++j) {
      pack_numbers(rows + j * a.ld_rows, is_line ? whole_k : 0, a.k, packed + j * 2);
    }
    i += count;
  }
  _mm_sfence();  // other threads read it
}

}  // namespace fastserve
