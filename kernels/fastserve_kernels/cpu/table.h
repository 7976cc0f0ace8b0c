// The table of one instruction set. Included last by each isa_*.cpp, which names FS_ISA and FS_ISA_NAME.
#pragma once

namespace fastserve {

const Ops* FS_TABLE() {
  static constexpr Ops kOps = {
      .isa = FS_ISA_NAME,
      .dot_order = FS_ISA::kDotOrder,
      .linear_args_size = sizeof(LinearArgs),
      .attention_args_size = sizeof(AttentionArgs),
      .rope_store_args_size = sizeof(RopeStoreArgs),
      .linear = FS_ISA::linear,
      .attention = FS_ISA::attention,
      .rope_store = FS_ISA::rope_store,
  };
  return &kOps;
}

}  // namespace fastserve
