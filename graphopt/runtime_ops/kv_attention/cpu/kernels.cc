#include "kv_attention/cpu/kernels.h"

#include "abi/instructions.h"
#include "kv_attention/cpu/append.h"
#include "kv_attention/cpu/attend.h"
#include "kv_attention/cpu/lists.h"
#include "kv_attention/cpu/merge.h"

namespace graphopt {

const KVAttentionKernels GRAPHOPT_NAME(kKVAttention) = {append,         attend_scratch, attend, score_scratch_of,
                                                            score_pages_of, list_pages_of,  merge};

}  // namespace graphopt
