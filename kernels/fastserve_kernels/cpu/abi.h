// What crosses the boundary to Python: plain structs and one table of functions per instruction set.
// bindings.py mirrors every struct; the sizes in the table let it refuse a library that does not match.
#pragma once

#include <cstdint>

#include "pool.h"

namespace fastserve {

using bf16 = uint16_t;

// A packed weight [n, k] is [ceil(n / 32)] panels of [kp / 2][32][2] bf16, kp = k rounded up to 32, rest zero.
// The pairs along K are what the bf16 dot instructions take; 32 outputs a step make one stream of 128 bytes, and
// 16 steps of it two AMX tiles. Every instruction set reads this one layout.
constexpr int kPanel = 32;
constexpr int kStep = 32;
static constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

enum Activation : int32_t { kNone = 0, kRelu = 1, kSiluMul = 2, kGeluTanhMul = 3 };

struct PackArgs {
  const bf16* weight;  // [n, k], or the gate's half when `up` is given
  const bf16* up;      // [n, k] or null: panels then hold 16 outputs of `weight` and the same 16 of `up`
  bf16* packed;
  int64_t ld_weight, ld_up, n, k;
};

struct LinearArgs {
  const bf16* x;            // [rows, k]
  const bf16* weight;       // packed
  const float* bias;        // [n rounded up to 32] in packed order, or null
  const float* norm_weight; // [k] or null: x is RMS-normalised first
  const bf16* residual;     // [rows, out columns] or null; may be `out` itself
  void* out;                // bf16 or float
  int64_t ld_x, ld_residual, ld_out, rows, k, n;  // n: output columns
  float eps;
  int32_t activation;
  int32_t out_is_float;
};

struct Ops {
  const char* isa;
  const char* dot_order;  // instruction sets with the same order give the same bits
  int64_t linear_args_size;
  void (*linear)(Pool*, const LinearArgs*);
};

// Null where this processor, or this kernel's permission to use AMX, does not allow it.
const Ops* ops_avx2();
const Ops* ops_avx512();
const Ops* ops_avx512_bf16();
const Ops* ops_amx();

}  // namespace fastserve
