// The table of one instruction set. Included last by each isa_*.cpp, which names FS_ISA, FS_ISA_NAME and FS_TABLE.
#pragma once

namespace fastserve {

const Ops* FS_TABLE() {
  static constexpr Ops kOps = {
      .isa = FS_ISA_NAME,
      .dot_order = FS_ISA::kDotOrder,
#define FS_SIZE(name, Args) .name##_args_size = sizeof(Args),
      FS_OPERATIONS(FS_SIZE)
#undef FS_SIZE
#define FS_FUNCTION(name, Args) .name = FS_ISA::name,
      FS_OPERATIONS(FS_FUNCTION)
#undef FS_FUNCTION
  };
  return &kOps;
}

}  // namespace fastserve
