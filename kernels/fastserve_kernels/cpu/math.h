// Functions of 16 floats, written once on top of simd_*.h.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

// Cache lines to ask memory for: so many in each step of 32 along K, from `next` on; into the L1 cache if `soon`.
struct Ahead {
  const bf16* next;
  int lines;
  bool soon;

  void ask() {
    const bf16* end = next + lines * 32;
    if (soon) {
      for (; next < end; next += 32) __builtin_prefetch(next, 0, 3);
    } else {
      for (; next < end; next += 32) __builtin_prefetch(next, 0, 2);
    }
  }
};

// One fixed tree, whatever the register width: (i, i + 8), (i, i + 4), (i, i + 2), (i, i + 1).
static inline float reduce_add(F16 v) {
  const __m256 eight = _mm256_add_ps(low_half(v), high_half(v));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float reduce_max(F16 v) {
  const __m256 eight = _mm256_max_ps(low_half(v), high_half(v));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// 2^x to about 1 ulp for x <= 127. Below -126 it is 0: at the bound of -127 exactly, so that a masked score of minus
// infinity weighs nothing, and above it denormal, which the unit takes for 0.
static inline F16 exp2(F16 x) {
  const F16 bounded = max(splat(-127.0f), x);  // of a bound and a NaN, the NaN
  const F16 magic = splat(12582912.0f);        // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
  const F16 shifted = add(bounded, magic);
  const F16 r = sub(bounded, sub(shifted, magic));
  F16 p = splat(1.3264727193e-3f);  // minimax on [-0.5, 0.5] with p(0) = 1
  p = fma(p, r, splat(9.6715126399e-3f));
  p = fma(p, r, splat(5.5507337433e-2f));
  p = fma(p, r, splat(2.4022242085e-1f));
  p = fma(p, r, splat(6.9314697760e-1f));
  p = fma(p, r, splat(1.0f));
  return add_to_exponent(p, shifted);
}

constexpr float kLog2E = 1.44269504f;

// 1 / x to about 1 ulp for 1 <= x < 1e37: a guess from the exponent, then Newton's steps. A division takes longer, and
// the processors' own estimates differ.
static inline F16 reciprocal(F16 x) {
  F16 r = subtract_bits(0x7ef311c3, x);
#pragma GCC unroll 3
  for (int i = 0; i < 3; ++i) r = fma(r, fnma(x, r, splat(1.0f)), r);
  return r;
}

static inline F16 tanh(F16 x) {  // 1 - 2 / (exp(2x) + 1)
  const F16 e = exp2(min(splat(60.0f), mul(x, splat(2.0f * kLog2E))));
  return fnma(splat(2.0f), reciprocal(add(e, splat(1.0f))), splat(1.0f));
}

// 1 / (1 + exp(-x)); some 1e-35 instead of less.
static inline F16 sigmoid(F16 x) {
  const F16 bounded = min(splat(80.0f), max(splat(-80.0f), x));
  return reciprocal(add(exp2(mul(bounded, splat(-kLog2E))), splat(1.0f)));
}

// silu(x) = x sigmoid(x); gelu(x), in its form with tanh, is x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
static inline F16 gate(F16 x, int32_t activation) {
  const F16 bounded = max(splat(-80.0f), x);  // below, both are 0 to any precision
  if (activation == kSiluMul) return mul(bounded, sigmoid(bounded));
  const F16 cube = mul(mul(bounded, bounded), bounded);
  return mul(bounded, sigmoid(mul(splat(1.5957691216f), fma(cube, splat(0.044715f), bounded))));
}

// The first n of 16 values, the rest 0: ends of rows that are no multiple of 16.
template <class T>
static inline F16 load_first(const T* p, int64_t n) {
  if (n >= 16) return load(p);
  T part[16] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return load(part);
}

template <class T>
static inline void store_first(T* p, F16 v, int64_t n) {
  if (n >= 16) return store(p, v);
  T part[16];
  store(part, v);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

}  // namespace FS_ISA
}  // namespace fastserve
