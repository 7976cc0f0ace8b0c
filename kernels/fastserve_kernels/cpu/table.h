// The table of one instruction set. Included last by each isa_*.cpp, which names FS_ISA, FS_ISA_NAME and FS_TABLE.
#pragma once

namespace fastserve {
namespace FS_ISA {

template <auto Operation, class Args>
static void call(Pool* pool, const Args* args) {
  const Region region(pool);
  Operation(pool, *args);
}

}  // namespace FS_ISA

const Ops* FS_TABLE() {
  static constexpr Ops kOps = {
      .isa = FS_ISA_NAME,
      .dot_order = FS_ISA::kDotOrder,
#define FS_SIZE(name, Args) .name##_args_size = sizeof(Args),
      FS_OPERATIONS(FS_SIZE)
#undef FS_SIZE
#define FS_FUNCTION(name, Args) .name = FS_ISA::call<FS_ISA::name, Args>,
      FS_OPERATIONS(FS_FUNCTION)
#undef FS_FUNCTION
  };
  return &kOps;
}

}  // namespace fastserve
