// Causal attention of query rows over the paged KV cache, for any mix of prompt chunks and decodes.
//
// A query row's result depends on its position and the cache alone: its keys are taken in superblocks of 64 tokens at
// fixed positions, in order, with an online softmax; a key outside the row's range gets a weight of exactly 0, which
// changes no sum. So rows may be tiled, and prompts chunked, in any way.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

static inline const bf16* kv_page(const KvView& kv, const int32_t* table, int64_t head, int64_t token) {
  const int64_t block = table[token / kv.block_size];
  return kv.data + block * kv.block_stride + head * kv.head_stride + token % kv.block_size * kv.head_dim;
}

// One tile: query rows of one sequence that share a KV head, with what the online softmax carries along.
class AttentionTile {
 public:
  static int64_t scratch_floats(int64_t head_dim) {
    return kMaxRows * (kSuperblock + kSuperblock / 2 + head_dim + head_dim / 2 + 16);
  }

  AttentionTile(const AttentionArgs& args, int64_t sequence, int64_t kv_head, int64_t first_row, int rows,
                float* scratch)
      : a_(args),
        kv_head_(kv_head),
        group_(args.num_heads / args.kv.num_kv_heads),
        first_row_(first_row),
        rows_(rows),
        table_(args.block_tables + sequence * args.ld_tables),
        first_token_(args.query_start[sequence]),
        first_position_(args.seq_lens[sequence] - (args.query_start[sequence + 1] - first_token_)),
        scores_(scratch),
        sums_(scores_ + kMaxRows * kSuperblock),
        totals_(sums_ + kMaxRows * args.kv.head_dim),
        weights_(reinterpret_cast<bf16*>(totals_ + kMaxRows * 16)),
        queries_(weights_ + kMaxRows * kSuperblock),
        alone_((args.query_start[sequence + 1] - first_token_) * group_ == rows) {}

  void run() {
    const int64_t head_dim = a_.kv.head_dim;
    for (int r = 0; r < rows_; ++r) {
      __builtin_memcpy(queries_ + r * head_dim, a_.q + offset(r, a_.ld_q), static_cast<size_t>(head_dim) * 2);
      maxima_[r] = -__builtin_inff();
      positions_[r] = first_position_ + (first_row_ + r) / group_;
      const int64_t first_key = positions_[r] - a_.window + 1;
      first_keys_[r] = a_.window > 0 && first_key > 0 ? first_key : 0;
    }
    __builtin_memset(sums_, 0, static_cast<size_t>(kMaxRows * (head_dim + 16)) * sizeof(float));
    const AttentionDot dots(rows_, head_dim);
    const int64_t last = positions_[rows_ - 1];
    for (int64_t base = first_keys_[0] / kSuperblock * kSuperblock; base <= last; base += kSuperblock) {
      superblock(dots, base, last);
    }
    for (int r = 0; r < rows_; ++r) finish(r);
  }

 private:
  static constexpr int kMaxRows = AttentionDot::kRows;

  // Row r of the tile is one head of one token: heads of the group run fastest, so that positions ascend.
  int64_t offset(int r, int64_t ld) const {
    const int64_t row = first_row_ + r;
    return (first_token_ + row / group_) * ld + (kv_head_ * group_ + row % group_) * a_.kv.head_dim;
  }
  void superblock(const AttentionDot& dots, int64_t base, int64_t last) {
    const int64_t tokens = last + 1 - base;
    const int num_pages = tokens >= kSuperblock ? kPages : static_cast<int>((tokens + kPageTokens - 1) / kPageTokens);
    const bf16* pages[kPages];
    for (int p = 0; p < num_pages; ++p) pages[p] = kv_page(a_.kv, table_, kv_head_, base + p * kPageTokens);
    if (alone_) {
      for (int p = 0; p < num_pages; ++p) prefetch(pages[p] + a_.kv.v_offset);
    }
    dots.scores(queries_, pages, num_pages, scores_);
    for (int r = 0; r < rows_; ++r) softmax(r, base);
    const int64_t ahead = alone_ ? base + 2 * kSuperblock : 0;
    for (int64_t t = base + kSuperblock; t <= last && t < ahead; t += kPageTokens) {
      prefetch(kv_page(a_.kv, table_, kv_head_, t));
    }
    for (int p = 0; p < num_pages; ++p) pages[p] += a_.kv.v_offset;
    dots.accumulate(weights_, pages, num_pages, sums_);
  }

  // Pages lie far apart: the hardware does not see the next one coming.
  void prefetch(const bf16* page) const {
    for (int64_t i = 0; i < kPageTokens * a_.kv.head_dim; i += 32) __builtin_prefetch(page + i);
  }

  void softmax(int r, int64_t base) {
    F16 s[kPages];  // in powers of 2 from here on
    for (int p = 0; p < kPages; ++p) s[p] = load(scores_ + r * kSuperblock + p * 16);
    if (a_.softcap > 0) {
      const F16 inverse = splat(a_.scale / a_.softcap), cap = splat(a_.softcap * kLog2E);
      for (F16& v : s) v = mul(tanh(mul(v, inverse)), cap);
    } else {
      for (F16& v : s) v = mul(v, splat(a_.scale * kLog2E));
    }
    if (first_keys_[r] > base || positions_[r] < base + kSuperblock - 1) mask(r, base, s);

    const float largest = reduce_max(max(max(s[0], s[1]), max(s[2], s[3])));
    const float maximum = largest > maxima_[r] ? largest : maxima_[r];
    // A row whose keys all lie in later superblocks has no maximum yet; any finite one gives it weights of 0.
    const F16 shift = splat(maximum == -__builtin_inff() ? 0.0f : maximum);
    bf16* weights = weights_ + r * kSuperblock;
    F16 total = load(totals_ + r * 16);
    if (maximum != maxima_[r]) {
      const F16 decay = exp2(sub(splat(maxima_[r]), shift));
      total = mul(total, decay);
      rescale(r, decay);
      maxima_[r] = maximum;
    }
#pragma GCC unroll 4
    for (int p = 0; p < kPages; ++p) store(weights + p * 16, exp2(sub(s[p], shift)));
#pragma GCC unroll 4
    for (int p = 0; p < kPages; ++p) total = add(total, load(weights + p * 16));  // summed is what multiplies V
    store(totals_ + r * 16, total);
  }

  void mask(int r, int64_t base, F16* s) const {
    const float first = static_cast<float>(first_keys_[r] - base), last = static_cast<float>(positions_[r] - base);
    for (int p = 0; p < kPages; ++p) {
      const F16 key = add(iota(), splat(static_cast<float>(p * kPageTokens)));
      s[p] = minus_infinity_unless(s[p], key, splat(first), splat(last));
    }
  }

  void rescale(int r, F16 decay) {
    float* sums = sums_ + r * a_.kv.head_dim;
    for (int64_t d = 0; d < a_.kv.head_dim; d += 16) store(sums + d, mul(load(sums + d), decay));
  }

  void finish(int r) const {
    const F16 total = splat(reduce_add(load(totals_ + r * 16)));
    const float* sums = sums_ + r * a_.kv.head_dim;
    bf16* out = a_.out + offset(r, a_.ld_out);
    for (int64_t d = 0; d < a_.kv.head_dim; d += 16) store(out + d, div(load(sums + d), total));
  }

  const AttentionArgs& a_;
  const int64_t kv_head_, group_, first_row_;
  const int rows_;
  const int32_t* table_;
  const int64_t first_token_, first_position_;
  float* scores_;    // [rows][64]
  float* sums_;      // [rows][head_dim]
  float* totals_;    // [rows][16]: the weights' sum, per lane
  bf16* weights_;    // [rows][64]
  bf16* queries_;    // [rows][head_dim]
  const bool alone_;  // no other tile reads these pages: they come from memory
  int64_t positions_[kMaxRows];
  int64_t first_keys_[kMaxRows];  // seen by the row
  float maxima_[kMaxRows];
};

static void attention(Pool* pool, const AttentionArgs& a) {
  const int64_t group = a.num_heads / a.kv.num_kv_heads;
  // tiles[s]: the number of tiles before sequence s, of one KV head
  int64_t* tiles = shared_scratch<int64_t>(pool, 0, a.num_sequences + 1);
  tiles[0] = 0;
  for (int64_t s = 0; s < a.num_sequences; ++s) {
    const int64_t rows = (a.query_start[s + 1] - a.query_start[s]) * group;
    tiles[s + 1] = tiles[s] + (rows + AttentionDot::kRows - 1) / AttentionDot::kRows;
  }
  parallel_for(pool, tiles[a.num_sequences] * a.kv.num_kv_heads, 1, [&](int64_t begin, int64_t end, int thread) {
    float* scratch = thread_scratch<float>(pool, thread, AttentionTile::scratch_floats(a.kv.head_dim));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t tile = unit / a.kv.num_kv_heads;
      int64_t low = 0, high = a.num_sequences;  // tiles[low] <= tile < tiles[high]
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (tiles[middle] <= tile ? low : high) = middle;
      }
      const int64_t first = (tile - tiles[low]) * AttentionDot::kRows;
      const int64_t left = (a.query_start[low + 1] - a.query_start[low]) * group - first;
      const int rows = static_cast<int>(left < AttentionDot::kRows ? left : AttentionDot::kRows);
      AttentionTile(a, low, unit % a.kv.num_kv_heads, first, rows, scratch).run();
    }
  });
}

}  // namespace FS_ISA
}  // namespace fastserve
