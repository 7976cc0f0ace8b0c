// The inner product of a block of rows with a panel, with AMX tiles.
//
// tdpbf16ps sums the 16 even and the 16 odd products of a step of 32 along K each from zero, adds the two sums and
// adds that to the accumulator. This differs in the last bits from vdpbf16ps, so a processor with AMX uses it for
// every number of rows: a row's result depends on that row alone, and one row still runs at memory speed.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

constexpr const char* kDotOrder = "steps of 32: even + odd";

// GCC's tile loads do not say that they read memory: without this, stores before them may be moved behind them.
static inline void memory_is_read() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
  void load() const {
    __asm__ volatile("" ::"r"(this) : "memory");  // as above: all of this is read
    _tile_loadconfig(this);
  }
};

class BlockDot {
 public:
  static int panels(int64_t) { return 1; }
  static int64_t block_rows(int) { return 32; }

  ~BlockDot() { _tile_release(); }  // or every context switch would save 8 KB

  // sums[rows][32] = x[rows, kp] . panel[kp / 2][32][2]. Meanwhile `pending` is finished: the tiles leave the vector
  // units idle, and what was just stored from tiles is slow to read back.
  template <class Pending>
  void run(const bf16* x, int64_t ld_x, int rows, const bf16* panel, int /*panels*/, int64_t kp, Ahead ahead,
           Pending& pending, float* sums) {
    configure(rows);
    memory_is_read();
    const bf16* second = rows > 16 ? x + 16 * ld_x : nullptr;
    multiply(x, second, ld_x, panel, kp, ahead, pending);
    pending.finish();
    _tile_stored(0, sums, kPanel * 4);
    _tile_stored(1, sums + 16, kPanel * 4);
    if (second == nullptr) return;
    _tile_stored(2, sums + 16 * kPanel, kPanel * 4);
    _tile_stored(3, sums + 16 * kPanel + 16, kPanel * 4);
  }

 private:
  // Tiles 0, 1: the first 16 rows' sums; 2, 3: the second 16 rows'; 4, 5: their inputs; 6, 7: weights.
  void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int first = rows < 16 ? rows : 16;
    const int second = rows > 16 ? rows - 16 : 1;
    TileConfig config;
    constexpr int kFirst[] = {0, 1, 4}, kSecond[] = {2, 3, 5};
    for (int tile : kFirst) config.set(tile, first, 64);
    for (int tile : kSecond) config.set(tile, second, 64);
    config.set(6, 16, 64);
    config.set(7, 16, 64);
    config.load();
  }

  template <class Pending>
  static void multiply(const bf16* x, const bf16* second, int64_t ld_x, const bf16* panel, int64_t kp, Ahead ahead,
                       Pending& pending) {
    constexpr int64_t kStepElements = kStep * kPanel;
    const int pending_rows = static_cast<int>((32 + kp / kStep - 1) / (kp / kStep));
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < kp; k += kStep, panel += kStepElements) {
      ahead.ask();
      _tile_loadd(6, panel, kPanel * 4);
      _tile_loadd(7, panel + 32, kPanel * 4);
      _tile_loadd(4, x + k, ld_x * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (second != nullptr) {
        _tile_loadd(5, second + k, ld_x * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      pending.advance(pending_rows);
    }
  }

  int rows_ = 0;
};

}  // namespace FS_ISA
}  // namespace fastserve
