#define FS_ISA avx512_bf16
#define FS_ISA_NAME "avx512_bf16"
#define FS_TABLE ops_avx512_bf16
#define FS_BF16_DOT
#include "simd_avx512.h"
#include "math.h"
#include "block_dot.h"
#include "linear.h"
#include "rope_store.h"
#include "attention_dot.h"
#include "attention.h"
#include "elementwise.h"
#include "all_reduce.h"
#include "decoder.h"
#include "table.h"
