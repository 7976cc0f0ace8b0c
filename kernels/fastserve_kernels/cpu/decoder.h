// Decoder layers in one call. The same operations as one by one, and the same bits; what is saved is the way
// through Python between them, which at one row is a tenth of the time.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

class Decoder {
 public:
  Decoder(Pool* pool, const DecoderArgs& args)
      : pool_(pool),
        a_(args),
        attention_size_(args.num_heads * args.kv.head_dim),
        kv_size_(args.kv.num_kv_heads * args.kv.head_dim),
        qkv_size_(attention_size_ + 2 * kv_size_),
        qkv_(shared_scratch<bf16>(pool, 1, args.num_tokens * qkv_size_)),
        attended_(shared_scratch<bf16>(pool, 2, args.num_tokens * attention_size_)),
        gated_(shared_scratch<bf16>(pool, 3, args.num_tokens * args.intermediate_size)) {}

  void run(int64_t index) {
    const DecoderLayer& layer = a_.layers[index];
    KvView kv = a_.kv;
    kv.data += index * a_.kv_layer_stride;
    normed_linear(layer.qkv, layer.qkv_bias, layer.input_norm, kNone, qkv_, qkv_size_);
    rotate_and_store(layer, kv);
    attend(layer, kv);
    add_linear(layer.out, layer.out_bias, layer.attention_out_norm, attended_, attention_size_);
    normed_linear(layer.gate_up, layer.gate_up_bias, layer.mlp_norm, a_.activation, gated_, a_.intermediate_size);
    add_linear(layer.down, layer.down_bias, layer.mlp_out_norm, gated_, a_.intermediate_size);
  }

 private:
  void normed_linear(const bf16* weight, const float* bias, const float* norm, int32_t activation, bf16* out,
                     int64_t n) {
    linear(pool_, {.x = a_.hidden, .weight = weight, .bias = bias, .norm_weight = norm, .residual = nullptr,
                   .out = out, .ld_x = a_.ld_hidden, .ld_residual = 0, .ld_out = n, .rows = a_.num_tokens,
                   .k = a_.hidden_size, .n = n, .eps = a_.norm_eps, .activation = activation, .out_is_float = 0});
  }

  void rotate_and_store(const DecoderLayer& layer, const KvView& kv) {
    rope_store(pool_, {.kv = kv, .q = qkv_, .k = qkv_ + attention_size_, .v = qkv_ + attention_size_ + kv_size_,
                       .cos = layer.cos, .sin = layer.sin, .q_norm = layer.q_norm, .k_norm = layer.k_norm,
                       .positions = a_.positions, .slots = a_.slots, .ld_q = qkv_size_, .ld_k = qkv_size_,
                       .ld_v = qkv_size_, .num_tokens = a_.num_tokens, .num_heads = a_.num_heads,
                       .norm_eps = a_.norm_eps});
  }

  void attend(const DecoderLayer& layer, const KvView& kv) {
    attention(pool_, {.kv = kv, .q = qkv_, .out = attended_, .block_tables = a_.block_tables,
                      .query_start = a_.query_start, .seq_lens = a_.seq_lens, .ld_q = qkv_size_,
                      .ld_out = attention_size_, .ld_tables = a_.ld_tables, .num_sequences = a_.num_sequences,
                      .num_heads = a_.num_heads, .scale = a_.scale, .softcap = a_.softcap, .window = layer.window});
  }

  // hidden += norm(x W^T + bias), summed over the ranks before the norm
  void add_linear(const bf16* weight, const float* bias, const float* norm, const bf16* x, int64_t k) {
    LinearArgs args = {.x = x, .weight = weight, .bias = bias, .norm_weight = nullptr, .residual = a_.hidden,
                       .out = a_.hidden, .ld_x = k, .ld_residual = a_.ld_hidden, .ld_out = a_.ld_hidden,
                       .rows = a_.num_tokens, .k = k, .n = a_.hidden_size, .eps = 0, .activation = kNone,
                       .out_is_float = 0};
    if (a_.group == nullptr && norm == nullptr) return linear(pool_, args);
    args.residual = nullptr;
    args.ld_out = a_.hidden_size;
    args.out_is_float = 1;
    if (a_.group != nullptr) return add_shared_linear(args, norm);
    float* sums = shared_scratch<float>(pool_, 4, a_.num_tokens * a_.hidden_size);
    args.out = sums;
    linear(pool_, args);
    for_rows(0, a_.num_tokens, [&](int64_t t, float*) { add_row(sums + t * a_.hidden_size, norm, hidden_row(t)); });
  }

  // A rank's linear writes where all ranks read it, as many rows at a time as find room there.
  void add_shared_linear(LinearArgs args, const float* norm) {
    const int64_t room = a_.group->slot_bytes / (a_.hidden_size * static_cast<int64_t>(sizeof(float)));
    const int64_t num_pieces = (a_.num_tokens + room - 1) / room;
    const bf16* x = args.x;
    for (int64_t i = 0; i < num_pieces; ++i) {
      const int64_t first = a_.num_tokens * i / num_pieces;
      args.rows = a_.num_tokens * (i + 1) / num_pieces - first;
      args.x = x + first * args.ld_x;
      SharedCall call(*a_.group);
      args.out = call.slot(a_.group->rank);
      linear(pool_, args);
      call.meet();
      add_sums(call, first, args.rows, norm);
    }
  }

  // The rows' sums, in rank order. Of many rows each rank takes a part and passes the hidden states on.
  void add_sums(SharedCall& call, int64_t first, int64_t rows, const float* norm) {
    const int64_t n = a_.hidden_size, num_ranks = a_.group->num_ranks, own = a_.group->rank;
    const auto sum_row = [&](int64_t t, float* sums) {
      sum_slots<float>(call, num_ranks, t * n, (t + 1) * n, sums);
      add_row(sums, norm, hidden_row(first + t));
    };
    if (num_ranks * rows * n * static_cast<int64_t>(sizeof(float)) < kShareOut) return for_rows(0, rows, sum_row);

    const auto part = [&](int64_t rank) { return rows * rank / num_ranks; };
    // A row's hidden state takes the place of this rank's share of its sum, which nobody else reads.
    const auto passed_on = [&](int64_t rank, int64_t t) {
      return reinterpret_cast<bf16*>(call.slot(rank) + t * n * static_cast<int64_t>(sizeof(float)));
    };
    const size_t row_bytes = static_cast<size_t>(n) * sizeof(bf16);
    for_rows(part(own), part(own + 1), [&](int64_t t, float* sums) {
      sum_row(t, sums);
      __builtin_memcpy(passed_on(own, t), hidden_row(first + t), row_bytes);
    });
    call.meet();
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      if (rank == own) continue;
      for (int64_t t = part(rank); t < part(rank + 1); ++t) {
        __builtin_memcpy(hidden_row(first + t), passed_on(rank, t), row_bytes);
      }
    }
  }

  // body(row, room for a row of floats) on several threads.
  template <class F>
  void for_rows(int64_t begin, int64_t end, const F& body) {
    parallel_for(pool_, end - begin, rows_per_piece(a_.hidden_size), [&](int64_t from, int64_t to, int thread) {
      float* row = thread_scratch<float>(pool_, thread, round_up(a_.hidden_size, kStep));
      for (int64_t t = begin + from; t < begin + to; ++t) body(t, row);
    });
  }

  bf16* hidden_row(int64_t t) const { return a_.hidden + t * a_.ld_hidden; }

  void add_row(float* x, const float* norm, bf16* hidden) const {
    const int64_t n = a_.hidden_size;
    if (norm != nullptr) rms_norm_row(x, norm, a_.norm_eps, x, n);
    for (int64_t i = 0; i < n; i += 16) {
      store_first(hidden + i, add(load_first(hidden + i, n - i), load_first(x + i, n - i)), n - i);
    }
  }

  Pool* const pool_;
  const DecoderArgs& a_;
  const int64_t attention_size_, kv_size_, qkv_size_;
  bf16 *const qkv_, *const attended_, *const gated_;
};

static void decoder(Pool* pool, const DecoderArgs& a) {
  Decoder layers(pool, a);
  for (int64_t i = 0; i < a.num_layers; ++i) layers.run(i);
}

}  // namespace FS_ISA
}  // namespace fastserve
