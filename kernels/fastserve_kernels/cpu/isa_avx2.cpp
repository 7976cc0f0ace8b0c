#define FS_ISA avx2
#define FS_ISA_NAME "avx2"
#define FS_TABLE ops_avx2
#include "simd_avx2.h"
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
