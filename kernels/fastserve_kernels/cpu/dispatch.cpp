// The C functions that Python calls: choosing an instruction set, the pool, packing.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "abi.h"
#include "pack.h"

using namespace fastserve;

namespace {

bool cpu_has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (d & kAmxBf16) && (d & kAmxTile);
}

// Linux lets a process use the 8 KB tile registers only after it has asked.
bool kernel_allows_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

bool has_amx() { return has_avx512_bf16() && cpu_has_amx() && kernel_allows_amx(); }

struct Candidate {
  const char* isa;
  bool (*supported)();
  const Ops* (*ops)();
};

constexpr Candidate kBestFirst[] = {
    {"amx", has_amx, ops_amx},
    {"avx512_bf16", has_avx512_bf16, ops_avx512_bf16},
    {"avx512", has_avx512, ops_avx512},
    {"avx2", has_avx2, ops_avx2},
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The table of `isa`, or of the best one for ""; null where this machine has none such.
const Ops* fs_ops(const char* isa) {
  for (const Candidate& candidate : kBestFirst) {
    if (*isa != '\0' && std::strcmp(isa, candidate.isa) != 0) continue;
    if (candidate.supported()) return candidate.ops();
  }
  return nullptr;
}

const char* fs_source_hash() { return FS_SOURCE_HASH; }

Pool* fs_pool_create(int num_threads, bool is_crowded) { return pool_create(num_threads, is_crowded); }
void fs_pool_destroy(Pool* pool) { pool_destroy(pool); }

void fs_pack(const PackArgs* args) { pack(*args); }

}  // extern "C"
#pragma GCC visibility pop
