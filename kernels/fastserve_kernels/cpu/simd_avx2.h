// 16 floats in two registers; operation by operation the same results as simd_avx512.h.
#pragma once

#include <immintrin.h>

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

struct F16 {
  __m256 lo, hi;
};
struct P16 {
  __m256i lo, hi;
};

static inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 splat(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
static inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F16 v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
static inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F16 fnma(F16 a, F16 b, F16 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline bool any_nan(F16 v) {
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(v.lo, v.lo, _CMP_UNORD_Q),
                                         _mm256_cmp_ps(v.hi, v.hi, _CMP_UNORD_Q))) != 0;
}
static inline F16 iota() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline __m256 minus_infinity_unless(__m256 value, __m256 key, __m256 first, __m256 last) {
  const __m256 inside = _mm256_and_ps(_mm256_cmp_ps(key, first, _CMP_GE_OQ), _mm256_cmp_ps(key, last, _CMP_LE_OQ));
  return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), value, inside);
}
// value where first <= key <= last, else minus infinity
static inline F16 minus_infinity_unless(F16 value, F16 key, F16 first, F16 last) {
  return {minus_infinity_unless(value.lo, key.lo, first.lo, last.lo),
          minus_infinity_unless(value.hi, key.hi, first.hi, last.hi)};
}
static inline __m256 add_to_exponent(__m256 value, __m256 shifted) {
  const __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), shift));
}
static inline F16 add_to_exponent(F16 value, F16 shifted) {
  return {add_to_exponent(value.lo, shifted.lo), add_to_exponent(value.hi, shifted.hi)};
}
static inline __m256 subtract_bits(int from, __m256 v) {
  return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_set1_epi32(from), _mm256_castps_si256(v)));
}
static inline F16 subtract_bits(int from, F16 v) { return {subtract_bits(from, v.lo), subtract_bits(from, v.hi)}; }
static inline __m256 low_half(F16 v) { return v.lo; }
static inline __m256 high_half(F16 v) { return v.hi; }

static inline __m256 widen(const bf16* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
static inline F16 load(const bf16* p) { return {widen(p), widen(p + 8)}; }
static inline __m256i narrow(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
static inline void store(bf16* p, F16 v) {
  const __m256i packed = _mm256_packus_epi32(narrow(v.lo), narrow(v.hi));  // packs within 128-bit lanes
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline P16 load_pairs(const bf16* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
static inline P16 splat_pair(const bf16* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
static inline __m256 dot(__m256 acc, __m256i a, __m256i b) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  acc = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(a, odd)), _mm256_castsi256_ps(_mm256_and_si256(b, odd)),
                        acc);
  return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)),
                         acc);
}
static inline F16 dot(F16 acc, P16 a, P16 b) { return {dot(acc.lo, a.lo, b.lo), dot(acc.hi, a.hi, b.hi)}; }

constexpr int kTileRows = 3;  // x 1 panel: 12 accumulators of the 16 registers
constexpr int kTilePanels = 1;

}  // namespace FS_ISA
}  // namespace fastserve
