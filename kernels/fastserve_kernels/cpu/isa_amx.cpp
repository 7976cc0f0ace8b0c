#define FS_ISA amx
#define FS_ISA_NAME "amx"
#define FS_TABLE ops_amx
#define FS_BF16_DOT
#include "simd_avx512.h"
#include "math.h"
#include "block_dot_amx.h"
#include "linear.h"
#include "rope_store.h"
#include "attention_dot_amx.h"
#include "attention.h"
#include "elementwise.h"
#include "all_reduce.h"
#include "decoder.h"
#include "table.h"
