/* Inside cuDNN attention: attention.c says which memory and which part of the batch, attention_graph.c what cuDNN
 * computes, attention_plan.c turns that into kernels and runs them. */
#pragma once
#include <cudnn.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a plan is built for: one launch, on a part of the batch. All int64_t: compared with memcmp. */
typedef struct {
    int64_t backward;
    int64_t B, T;           /* sequences of T tokens; or documents of up to T tokens */
    int64_t H, K, D;        /* heads of this launch                                  */
    int64_t all_H;          /* query heads in y, dy and lse                          */
    int64_t q_width;        /* elements from token to token in q and dq ...          */
    int64_t kv_width;       /* ... and in k, v, dk and dv                            */
    int64_t tokens;         /* documents only: N, tokens of all rows; else 0         */
    int64_t window;         /* keys that a query sees; 0: all before it              */
} AttentionKey;

/* The tensors of a plan. lse: (B, all_H, T), with documents (tokens, all_H); delta: (B, H, T), with documents as lse. */
typedef enum {
    ATT_Q = 1, ATT_K, ATT_V, ATT_Y, ATT_LSE, ATT_DY, ATT_DQ, ATT_DK, ATT_DV,
    ATT_SCALE, ATT_MINUS_INFINITY, ATT_ONE, ATT_WINDOW,     /* floats in host memory                             */
    ATT_QUERIES, ATT_KEYS,                                  /* documents: their lengths (B), as queries, as keys */
    ATT_Q_AT, ATT_K_AT, ATT_V_AT, ATT_Y_AT, ATT_LSE_AT,     /* documents: where they begin (B + 1), in elements  */
    ATT_DELTA, ATT_DK_HEADS, ATT_DV_HEADS,                  /* backward's own buffers, in the workspace          */
    ATT_NAMES,
    ATT_VIRTUAL = 100                                       /* from here on: lives inside the kernel             */
} AttentionName;

typedef cudnnBackendDescriptor_t Desc;

/* A graph under construction. */
typedef struct {
    const AttentionKey *key;
    Desc made[256], op[64];             /* everything that was created; the operations among it */
    int made_count, op_count;
    int64_t next_virtual;
    Desc queries, keys, q_at, k_at, v_at, y_at, lse_at;         /* NULL without documents */
    Desc q, k, v, y, lse, scale, minus_infinity;
    int64_t at[ATT_NAMES], bytes;       /* backward's own buffers: offsets, or -1; their sum */
} AttentionGraph;

void attention_describe(AttentionGraph *g, const AttentionKey *key);

/* cuDNN's plan for the key, built at its first use. Dies if cuDNN has none. */
typedef struct AttentionPlan AttentionPlan;
const AttentionPlan *attention_plan(AttentionKey key);

/* Queues it. memory[name] for the names that the key needs, else NULL; the workspace is scratch memory of its own. */
void attention_run(const AttentionPlan *plan, void *const memory[ATT_NAMES]);

#define CUDNN_CHECK(call) cudnn_check((call), #call)
void cudnn_check(cudnnStatus_t status, const char *call);
Desc cudnn_create(cudnnBackendDescriptorType_t type);
void cudnn_set(Desc d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t n, const void *x);
void cudnn_set_desc(Desc d, cudnnBackendAttributeName_t name, Desc x);      /* nothing if x is NULL */

#ifdef __cplusplus
}
#endif
