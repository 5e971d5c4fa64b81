#include "kv_attention/cpu/kernels.h"

#include "abi/instructions.h"
#include "kv_attention/cpu/append.h"
#include "kv_attention/cpu/attend.h"
#include "kv_attention/cpu/choose.h"
#include "kv_attention/cpu/merge.h"
#include "kv_attention/cpu/score.h"

namespace graphopt {

const KVAttentionKernels GRAPHOPT_NAME(kKVAttention) = {append, attend_scratch, attend, score, list_pages, merge};

}  // namespace graphopt
