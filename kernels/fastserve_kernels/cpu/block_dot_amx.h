// The inner product of a block of rows with one or two panels, with AMX tiles.
//
// tdpbf16ps sums the 16 even and the 16 odd products of a step of 32 along K each from zero, adds the two sums and
// adds that to the accumulator. This differs in the last bits from vdpbf16ps, so a processor with AMX uses it for
// every number of rows: a row's result depends on that row alone, and one row still runs at memory speed.
#pragma once

#include "abi.h"

namespace fastserve {
namespace FS_ISA {

constexpr const char* kDotOrder = "steps of 32: even + odd";

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
};

class BlockDot {
 public:
  static int panels(int64_t rows) { return rows <= 16 ? 2 : 1; }
  static int64_t block_rows(int panels) { return panels == 2 ? 16 : 32; }

  ~BlockDot() { _tile_release(); }  // or every context switch would save 8 KB

  // acc[rows][panels * 32] = x[rows, kp] . panels[panels][kp / 2][32][2]
  void run(const bf16* x, int64_t ld_x, int rows, const bf16* w, int panels, int64_t kp, float* acc) {
    configure(rows);
    if (panels == 2) return two_panels(x, ld_x, w, kp, acc);
    if (rows > 16) return two_row_tiles(x, ld_x, w, kp, acc);
    one_panel(x, ld_x, w, kp, acc);
  }

 private:
  static constexpr int64_t kRowBytes = kPanel * 4;  // of a panel: 32 pairs

  // Tiles 0, 1: the first 16 rows' sums; 2, 3: the second 16 rows' or second panel's; 4, 5: inputs; 6, 7: weights.
  void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    const int first = rows < 16 ? rows : 16;
    const int second = rows > 16 ? rows - 16 : first;
    TileConfig config;
    for (int tile : kFirstRows) config.set(tile, first, 64);
    for (int tile : kSecondRows) config.set(tile, second, 64);
    config.set(6, 16, 64);
    config.set(7, 16, 64);
    _tile_loadconfig(&config);
  }

  static void two_panels(const bf16* x, int64_t ld_x, const bf16* w, int64_t kp, float* acc) {
    const bf16* second = w + kPanel * kp;
    clear();
    for (int64_t k = 0; k < kp; k += kStep) {
      _tile_loadd(4, x + k, ld_x * 2);
      _tile_loadd(6, w + k * kPanel, kRowBytes);
      _tile_loadd(7, w + k * kPanel + 32, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, second + k * kPanel, kRowBytes);
      _tile_loadd(7, second + k * kPanel + 32, kRowBytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, acc, 4 * 64);
    _tile_stored(1, acc + 16, 4 * 64);
    _tile_stored(2, acc + 32, 4 * 64);
    _tile_stored(3, acc + 48, 4 * 64);
  }

  static void two_row_tiles(const bf16* x, int64_t ld_x, const bf16* w, int64_t kp, float* acc) {
    clear();
    for (int64_t k = 0; k < kp; k += kStep) {
      _tile_loadd(6, w + k * kPanel, kRowBytes);
      _tile_loadd(7, w + k * kPanel + 32, kRowBytes);
      _tile_loadd(4, x + k, ld_x * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x + 16 * ld_x + k, ld_x * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, acc, 2 * 64);
    _tile_stored(1, acc + 16, 2 * 64);
    _tile_stored(2, acc + 16 * 32, 2 * 64);
    _tile_stored(3, acc + 16 * 32 + 16, 2 * 64);
  }

  static void one_panel(const bf16* x, int64_t ld_x, const bf16* w, int64_t kp, float* acc) {
    clear();
    for (int64_t k = 0; k < kp; k += kStep) {
      _tile_loadd(4, x + k, ld_x * 2);
      _tile_loadd(6, w + k * kPanel, kRowBytes);
      _tile_loadd(7, w + k * kPanel + 32, kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, acc, 2 * 64);
    _tile_stored(1, acc + 16, 2 * 64);
  }

  static void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static constexpr int kFirstRows[] = {0, 1, 4};
  static constexpr int kSecondRows[] = {2, 3, 5};
  int rows_ = 0;
};

}  // namespace FS_ISA
}  // namespace fastserve
