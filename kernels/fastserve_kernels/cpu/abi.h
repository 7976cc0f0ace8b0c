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

// Output `first + i` of a weight goes to panel (first + i) / per_panel, lane `lane` + (first + i) % per_panel. A plain
// weight has 32 a panel; of a gated one's halves each has 16, the gate from lane 0 on and `up` from lane 16.
struct PackArgs {
  const bf16* rows;  // [num_rows, k], ld_rows apart
  bf16* packed;      // of the whole weight; what no output fills must be zero
  int64_t ld_rows, first, num_rows, k, per_panel, lane;
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

// The KV cache of one layer, seen as pages of 16 tokens: a block of `block_size` tokens and one head holds
// block_size / 16 of them, K as [head_dim / 2][16 tokens][2], V as [8 token pairs][head_dim][2]. One K row is what a
// dot instruction takes for 16 scores, one V row for 16 sums; 16 K rows or 8 V rows are an AMX tile.
constexpr int kPageTokens = 16;

struct KvView {
  bf16* data;
  int64_t block_stride, v_offset, head_stride;  // in elements; a block is contiguous per head
  int64_t block_size, num_kv_heads, head_dim;   // head_dim: a multiple of 16
};

struct AttentionArgs {
  KvView kv;
  const bf16* q;  // [num_tokens, num_heads, head_dim], rows ld_q apart
  bf16* out;      // likewise, ld_out
  const int32_t* block_tables;  // [num_sequences, ld_tables]
  const int32_t* query_start;   // [num_sequences + 1]
  const int32_t* seq_lens;      // [num_sequences], these tokens included
  int64_t ld_q, ld_out, ld_tables, num_sequences, num_heads;
  float scale;
  float softcap;   // 0: none; else scores become softcap * tanh(score / softcap)
  int64_t window;  // 0: none; else a token sees itself and the window - 1 before it
};

// Rotates q and k by their positions and stores k and v, at slot = block * block_size + offset.
struct RopeStoreArgs {
  KvView kv;
  bf16* q;           // [num_tokens, num_heads, head_dim], rotated in place
  const bf16* k;     // [num_tokens, num_kv_heads, head_dim]
  const bf16* v;
  const float* cos;  // [positions, head_dim / 2]; null: no rotation
  const float* sin;
  const float* q_norm;  // [head_dim] or null: q and k are RMS-normalised per head first
  const float* k_norm;
  const int64_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]
  int64_t ld_q, ld_k, ld_v, num_tokens, num_heads;
  float norm_eps;
};

struct RmsNormArgs {
  const bf16* x;   // [rows, n]
  bf16* residual;  // [rows, n] or null: becomes residual + x and is what is normalised
  const float* weight;
  bf16* out;
  int64_t ld_x, ld_residual, ld_out, rows, n;
  float eps;
};

struct GateMulArgs {
  const bf16* gate;  // [rows, n]
  const bf16* up;
  bf16* out;
  int64_t ld_gate, ld_up, ld_out, rows, n;
  int32_t activation;
};

struct EmbeddingArgs {
  const bf16* table;  // [num_rows, n]: the rows of ids first_id .. first_id + num_rows - 1; others give zeros
                      // (ld_table 0: a packed weight, so that a tied head needs no second copy)
  const int64_t* ids;
  bf16* out;
  int64_t ld_table, ld_out, first_id, num_rows, num_ids, n;
  float scale;  // 1: plain copies
};

struct ArgmaxArgs {
  const float* x;  // [rows, n]
  int64_t* out;    // the first of the largest; -1 where that is no finite number, or a NaN is in the row
  int64_t ld_x, rows, n;
};

struct CopyBlocksArgs {
  const uint8_t* source;
  uint8_t* target;
  const int64_t* pairs;  // [num_pairs][2]: source block, target block
  int64_t block_bytes, num_pairs;
};

// One process's view of a segment that the ranks of a node share: see all_reduce.h.
struct SharedGroup {
  uint8_t* segment;
  int64_t rank, num_ranks, slot_bytes;
  uint32_t num_arrivals, num_calls;  // how often this rank has arrived, and called
  int64_t num_looks;                 // at a rank that is late, before going to sleep
};

struct AllReduceArgs {
  SharedGroup* group;
  void* x;  // summed in place, in float32 in rank order, rounded once
  int64_t n;
  int32_t is_float;
};

struct AllGatherArgs {
  SharedGroup* group;
  const uint8_t* x;  // [rows, row_bytes]
  uint8_t* out;      // [rows, num_ranks * row_bytes], or null: this rank only gives
  int64_t rows, row_bytes;
};

// A decoder layer of the Llama kind: norm, attention, norm, gated MLP. A null pointer: the family has none such.
struct DecoderLayer {
  const float *input_norm, *mlp_norm;            // [hidden]
  const float *attention_out_norm, *mlp_out_norm;  // [hidden]: on what is added to the hidden state
  const float *q_norm, *k_norm;                  // [head_dim]
  const bf16 *qkv, *out, *gate_up, *down;        // packed
  const float *qkv_bias, *out_bias, *gate_up_bias, *down_bias;
  const float *cos, *sin;  // [positions, head_dim / 2]
  int64_t window;
};

struct DecoderArgs {
  KvView kv;  // of the first of these layers
  const DecoderLayer* layers;
  SharedGroup* group;  // sums the ranks' shares, or null for one rank
  bf16* hidden;        // [num_tokens, hidden_size], the residual stream, updated
  const int64_t *positions, *slots;                       // as RopeStoreArgs
  const int32_t *block_tables, *query_start, *seq_lens;  // as AttentionArgs
  int64_t ld_hidden, ld_tables, num_tokens, num_sequences, num_layers, kv_layer_stride;
  int64_t hidden_size, intermediate_size, num_heads;  // of this rank's share
  float norm_eps, scale, softcap;
  int32_t activation;
};

// Every operation: its name and the struct it takes. abi.py lists the same, in this order.
#define FS_OPERATIONS(OP)         \
  OP(linear, LinearArgs)           \
  OP(attention, AttentionArgs)     \
  OP(rope_store, RopeStoreArgs)    \
  OP(rms_norm, RmsNormArgs)        \
  OP(gate_mul, GateMulArgs)        \
  OP(embedding, EmbeddingArgs)     \
  OP(argmax, ArgmaxArgs)           \
  OP(copy_blocks, CopyBlocksArgs)  \
  OP(all_reduce, AllReduceArgs)    \
  OP(all_gather, AllGatherArgs)   \
  OP(decoder, DecoderArgs)

struct Ops {
  const char* isa;
  const char* dot_order;  // instruction sets with the same order give the same bits
#define FS_SIZE(name, Args) int64_t name##_args_size;
  FS_OPERATIONS(FS_SIZE)
#undef FS_SIZE
#define FS_FUNCTION(name, Args) void (*name)(Pool*, const Args*);
  FS_OPERATIONS(FS_FUNCTION)
#undef FS_FUNCTION
};

// Null where this processor, or this kernel's permission to use AMX, does not allow it.
const Ops* ops_avx2();
const Ops* ops_avx512();
const Ops* ops_avx512_bf16();
const Ops* ops_amx();

}  // namespace fastserve
