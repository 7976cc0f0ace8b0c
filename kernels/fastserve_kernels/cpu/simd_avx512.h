// 16 floats in one register. Every operation rounds as its AVX2 twin does, so that results do not depend on the
// instruction set. With bf16 dot instructions (FS_BF16_DOT) only conversions and dots change, not their results.
#pragma once

#include <immintrin.h>

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

using F16 = __m512;
using P16 = __m512i;  // 16 pairs of bf16

static inline F16 zero() { return _mm512_setzero_ps(); }
static inline F16 splat(float v) { return _mm512_set1_ps(v); }
static inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F16 v) { _mm512_storeu_ps(p, v); }
static inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
static inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
static inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
static inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
static inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline F16 fnma(F16 a, F16 b, F16 c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
// Of a NaN and a number, max and min give the second argument.
static inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
static inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
static inline bool any_nan(F16 v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q) != 0; }
static inline F16 iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
// value where first <= key <= last, else minus infinity
static inline F16 minus_infinity_unless(F16 value, F16 key, F16 first, F16 last) {
  const __mmask16 inside = _mm512_cmp_ps_mask(key, first, _CMP_GE_OQ) & _mm512_cmp_ps_mask(key, last, _CMP_LE_OQ);
  return _mm512_mask_blend_ps(inside, _mm512_set1_ps(-__builtin_inff()), value);
}
// value * 2^n, n in the low bits of `shifted`; the result must be normal
static inline F16 add_to_exponent(F16 value, F16 shifted) {
  const __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), shift));
}
static inline F16 subtract_bits(int from, F16 v) {
  return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(from), _mm512_castps_si512(v)));
}
static inline __m256 low_half(F16 v) { return _mm512_castps512_ps256(v); }
static inline __m256 high_half(F16 v) { return _mm512_extractf32x8_ps(v, 1); }

static inline F16 load(const bf16* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
static inline void store(bf16* p, F16 v) {
#ifdef FS_BF16_DOT
  const __m256i half = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

static inline P16 load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
static inline P16 splat_pair(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return _mm512_set1_epi32(pair);
}
// acc + a.odd * b.odd, rounded, then + a.even * b.even, rounded: the order of vdpbf16ps.
static inline F16 dot(F16 acc, P16 a, P16 b) {
#ifdef FS_BF16_DOT
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  acc = fma(_mm512_castsi512_ps(_mm512_and_si512(a, odd)), _mm512_castsi512_ps(_mm512_and_si512(b, odd)), acc);
  return fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
#endif
}

#ifdef FS_BF16_DOT
constexpr int kTileRows = 6;  // x 2 panels: 24 accumulators, 4 weights, the rest for broadcasts
#else
constexpr int kTileRows = 4;  // x 2 panels: room for the odd and even halves of the weights
#endif
constexpr int kTilePanels = 2;

}  // namespace FS_ISA
}  // namespace fastserve
