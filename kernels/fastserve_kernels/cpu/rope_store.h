// Per head: RMS norm (some families), rotation by the position, and the write of K and V into their pages.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

// Rotates the pairs (x[i], x[i + n / 2]) by the angle whose cosine and sine are given; `out` may be x.
static inline void rotate(const bf16* x, const float* cos, const float* sin, bf16* out, int64_t n) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t left = half - i;
    const F16 a = load_first(x + i, left), b = load_first(x + half + i, left);
    const F16 c = load_first(cos + i, left), s = load_first(sin + i, left);
    store_first(out + i, sub(mul(a, c), mul(b, s)), left);
    store_first(out + half + i, add(mul(b, c), mul(a, s)), left);
  }
}

class RopeStore {
 public:
  explicit RopeStore(const RopeStoreArgs& args) : a_(args), half_(args.kv.head_dim / 2) {}

  // A token's K goes to every line of its page; asking for all of them at once takes a tenth of the time of waiting for
  // one after the other.
  void prefetch(int64_t t) const {
    for (int64_t h = 0; h < a_.kv.num_kv_heads; ++h) {
      const bf16* page = page_of(t, h);
      for (int64_t i = 0; i < kPageTokens * a_.kv.head_dim; i += 32) __builtin_prefetch(page + i, 1);
      const bf16* v = page + a_.kv.v_offset + a_.slots[t] % kPageTokens / 2 * a_.kv.head_dim * 2;
      for (int64_t i = 0; i < 2 * a_.kv.head_dim; i += 32) __builtin_prefetch(v + i, 1);
    }
  }

  void token(int64_t t) const {
    bf16* q = a_.q + t * a_.ld_q;
    for (int64_t h = 0; h < a_.num_heads; ++h) prepare(q + h * a_.kv.head_dim, a_.q_norm, t, q + h * a_.kv.head_dim);
    for (int64_t h = 0; h < a_.kv.num_kv_heads; ++h) {
      bf16* page = page_of(t, h);
      const int64_t row = a_.slots[t] % kPageTokens;
      store_k(t, h, page, row);
      store_v(t, h, page + a_.kv.v_offset, row);
    }
  }

 private:
  bf16* page_of(int64_t t, int64_t head) const {
    const int64_t slot = a_.slots[t], size = a_.kv.block_size;
    bf16* block = a_.kv.data + slot / size * a_.kv.block_stride + head * a_.kv.head_stride;
    return block + slot % size / kPageTokens * kPageTokens * a_.kv.head_dim;
  }

  void prepare(const bf16* x, const float* norm, int64_t t, bf16* out) const {
    if (norm != nullptr) {
      rms_norm_row(x, norm, a_.norm_eps, out, a_.kv.head_dim);
      x = out;
    }
    if (a_.cos != nullptr) {
      rotate(x, a_.cos + a_.positions[t] * half_, a_.sin + a_.positions[t] * half_, out, a_.kv.head_dim);
    } else if (x != out) {
      __builtin_memcpy(out, x, static_cast<size_t>(a_.kv.head_dim) * sizeof(bf16));
    }
  }

  void store_k(int64_t t, int64_t head, bf16* page, int64_t row) const {
    bf16 k[kMaxHeadDim];
    prepare(a_.k + t * a_.ld_k + head * a_.kv.head_dim, a_.k_norm, t, k);
    for (int64_t d = 0; d < a_.kv.head_dim; d += 2) {
      __builtin_memcpy(page + (d / 2 * kPageTokens + row) * 2, k + d, 2 * sizeof(bf16));
    }
  }

  void store_v(int64_t t, int64_t head, bf16* page, int64_t row) const {
    const bf16* v = a_.v + t * a_.ld_v + head * a_.kv.head_dim;
    bf16* pairs = page + row / 2 * a_.kv.head_dim * 2 + row % 2;
    for (int64_t d = 0; d < a_.kv.head_dim; ++d) pairs[2 * d] = v[d];
    if (ends_new_page(t, row)) clear_v_after(page, row);
  }

  // Attention weighs the tokens behind a sequence's end with 0, and 0 * NaN is NaN: a page that has just been taken
  // into use must not keep what an earlier owner left. Whoever writes its last token so far clears the rest.
  bool ends_new_page(int64_t t, int64_t row) const {
    const bool last = t + 1 == a_.num_tokens || a_.slots[t + 1] != a_.slots[t] + 1;
    return last && row + 1 < kPageTokens && t >= row && a_.slots[t - row] == a_.slots[t] - row;
  }

  void clear_v_after(bf16* page, int64_t row) const {
    const int64_t n = a_.kv.head_dim;
    bf16* pairs = page + row / 2 * n * 2;
    if (row % 2 == 0) {
      for (int64_t d = 0; d < n; ++d) pairs[2 * d + 1] = 0;
    }
    const int64_t next = row / 2 + 1;
    __builtin_memset(page + next * n * 2, 0, static_cast<size_t>((kPageTokens / 2 - next) * n * 2) * sizeof(bf16));
  }

  static constexpr int kMaxHeadDim = 512;
  const RopeStoreArgs& a_;
  const int64_t half_;
};

static void rope_store(Pool* pool, const RopeStoreArgs& a) {
  const RopeStore op(a);
  parallel_for(pool, a.num_tokens, 8, [&](int64_t begin, int64_t end, int) {
    op.prefetch(begin);
    for (int64_t t = begin; t < end; ++t) {
      if (t + 1 < end) op.prefetch(t + 1);
      op.token(t);
    }
  });
}

}  // namespace FS_ISA
}  // namespace fastserve
