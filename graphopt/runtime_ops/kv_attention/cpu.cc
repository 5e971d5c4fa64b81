#include "kv_attention/cpu.h"

#include "abi/instructions.h"
#include "kv_attention/append.h"
#include "kv_attention/attend.h"
#include "kv_attention/choose.h"
#include "kv_attention/merge.h"
#include "kv_attention/score.h"

namespace graphopt {

const KVAttentionKernels GRAPHOPT_NAME(kKVAttention) = {append, attend_scratch, attend, score, list_pages, merge};

}  // namespace graphopt
