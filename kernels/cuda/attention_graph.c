/* The two graphs of attention, in the operations of cuDNN's backend API: those that its engines recognize
 * and run as one flash attention kernel. The equations are in kernels/cpu/attention.c.
 *
 * Names: B, T, H, K, D as in the key; q, k, v are (heads, T, D) per batch entry, in rows of q_width and kv_width.
 *
 * NOTE: with documents a gradient has the strides and the ragged offsets of its input: dq those of q, dk of k, dv of
 * v. Where dk and dv had others, cuDNN 9 accepted the graph and wrote to wrong places, also outside the tensors. */
#include "kernels/cuda/attention.h"

/* ---- describing a graph --------------------------------------------------------------------------------------- */

static Desc make(AttentionGraph *g, cudnnBackendDescriptorType_t type)
{
    CHECK(g->made_count < (int)(sizeof g->made / sizeof g->made[0]), "attention graph too large");
    return g->made[g->made_count++] = cudnn_create(type);
}

typedef struct { int64_t n[4]; } Dims;

static Desc tensor(AttentionGraph *g, int64_t name, cudnnDataType_t type, Dims dims, Dims strides, Desc ragged)
{
    const int64_t align = 16;
    const bool yes = true;
    Desc d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    if (name == ATT_VIRTUAL) {
        name = g->next_virtual++;
        cudnn_set(d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    }
    if (name == ATT_SCALE || name == ATT_MINUS_INFINITY || name == ATT_ONE || name == ATT_WINDOW)
        cudnn_set(d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    cudnn_set(d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &name);
    cudnn_set(d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_set(d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, dims.n);
    cudnn_set(d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides.n);
    cudnn_set(d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &align);
    cudnn_set_desc(d, CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC, ragged);
    CUDNN_CHECK(cudnnBackendFinalize(d));
    return d;
}

static Desc scalar(AttentionGraph *g, int64_t name)
{
    return tensor(g, name, CUDNN_DATA_FLOAT, (Dims){{ 1, 1, 1, 1 }}, (Dims){{ 1, 1, 1, 1 }}, NULL);
}

/* (B, H, T, T), inside the kernel: scores and what becomes of them. */
static Desc scores(AttentionGraph *g, cudnnDataType_t type)
{
    const int64_t B = g->key->B, H = g->key->H, T = g->key->T;
    return tensor(g, ATT_VIRTUAL, type, (Dims){{ B, H, T, T }}, (Dims){{ H * T * T, T * T, T, 1 }}, NULL);
}

static Desc scores_transposed(AttentionGraph *g)
{
    const int64_t B = g->key->B, H = g->key->H, T = g->key->T;
    Dims dims = {{ B, H, T, T }}, strides = {{ H * T * T, T * T, 1, T }};
    return tensor(g, ATT_VIRTUAL, CUDNN_DATA_BFLOAT16, dims, strides, NULL);
}

/* (B, H, T, 1), inside the kernel: a number per query. */
static Desc per_query(AttentionGraph *g)
{
    const int64_t B = g->key->B, H = g->key->H, T = g->key->T;
    return tensor(g, ATT_VIRTUAL, CUDNN_DATA_FLOAT, (Dims){{ B, H, T, 1 }}, (Dims){{ H * T, T, 1, 1 }}, NULL);
}

/* The same with memory: (B, all_H, T), or (tokens, all_H) with documents. */
static Desc stored_per_query(AttentionGraph *g, int64_t name, int64_t heads)
{
    const int64_t B = g->key->B, H = g->key->H, T = g->key->T;
    Dims dims = {{ B, H, T, 1 }}, dense = {{ heads * T, T, 1, 1 }}, packed = {{ heads * T, 1, heads, 1 }};
    return tensor(g, name, CUDNN_DATA_FLOAT, dims, g->lse_at ? packed : dense, g->lse_at);
}

/* (B, heads, T, D) in rows of `width` elements. */
static Desc rows(AttentionGraph *g, int64_t name, int64_t heads, int64_t width, Desc ragged)
{
    const int64_t B = g->key->B, T = g->key->T, D = g->key->D;
    Dims dims = {{ B, heads, T, D }}, strides = {{ T * width, D, width, 1 }};
    return tensor(g, name, CUDNN_DATA_BFLOAT16, dims, strides, ragged);
}

/* The same memory as (B, heads, D, T). */
static Desc columns(AttentionGraph *g, int64_t name, int64_t heads, int64_t width, Desc ragged)
{
    const int64_t B = g->key->B, T = g->key->T, D = g->key->D;
    Dims dims = {{ B, heads, D, T }}, strides = {{ T * width, D, 1, width }};
    return tensor(g, name, CUDNN_DATA_BFLOAT16, dims, strides, ragged);
}

static void add_op(AttentionGraph *g, Desc op)
{
    CHECK(g->op_count < (int)(sizeof g->op / sizeof g->op[0]), "attention graph too large");
    CUDNN_CHECK(cudnnBackendFinalize(op));
    g->op[g->op_count++] = op;
}

/* c = a b, with m, n, k cut to the documents' lengths where given. */
static void product(AttentionGraph *g, Desc c, Desc a, Desc b, Desc m, Desc n, Desc k)
{
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    Desc kind = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    Desc op = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    cudnn_set(kind, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    CUDNN_CHECK(cudnnBackendFinalize(kind));
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_DESC, kind);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC, m);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC, n);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC, k);
    add_op(g, op);
}

/* y = mode(x, b, t), computed in `type`; returns y. */
static Desc pointwise(AttentionGraph *g, cudnnPointwiseMode_t mode, cudnnDataType_t type, Desc y, Desc x, Desc b,
                      Desc t)
{
    Desc kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    Desc op = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    cudnn_set(kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    cudnn_set(kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    CUDNN_CHECK(cudnnBackendFinalize(kind));
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    add_op(g, op);
    return y;
}

/* y = mode(x, b) in F32, of the shape of scores, inside the kernel. */
static Desc on_scores(AttentionGraph *g, cudnnPointwiseMode_t mode, Desc x, Desc b)
{
    return pointwise(g, mode, CUDNN_DATA_FLOAT, scores(g, CUDNN_DATA_FLOAT), x, b, NULL);
}

/* Number of each score's query (axis 2) or key (axis 3). */
static Desc position(AttentionGraph *g, Desc x, int64_t axis, cudnnDataType_t type)
{
    const cudnnPointwiseMode_t mode = CUDNN_POINTWISE_GEN_INDEX;
    Desc kind = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    Desc op = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    Desc y = scores(g, CUDNN_DATA_INT32);
    cudnn_set(kind, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    cudnn_set(kind, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_set(kind, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    CUDNN_CHECK(cudnnBackendFinalize(kind));
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, kind);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_op(g, op);
    return y;
}

static Desc reduce(AttentionGraph *g, cudnnReduceTensorOp_t mode, Desc y, Desc x)
{
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    Desc kind = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    Desc op = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    cudnn_set(kind, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &f32);
    cudnn_set(kind, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    CUDNN_CHECK(cudnnBackendFinalize(kind));
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_REDUCTION_DESC, kind);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    add_op(g, op);
    return y;
}

static Desc reshape(AttentionGraph *g, Desc y, Desc x)
{
    Desc op = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    cudnn_set_desc(op, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_op(g, op);
    return y;
}

/* ---- the two graphs ----------------------------------------------------------------------------------------- */

static Desc per_document(AttentionGraph *g, int64_t name, int64_t n)
{
    if (!g->key->tokens)
        return NULL;
    return tensor(g, name, CUDNN_DATA_INT32, (Dims){{ n, 1, 1, 1 }}, (Dims){{ 1, 1, 1, 1 }}, NULL);
}

/* What both graphs read. NOTE: cuDNN wants k, and in backward v too, as columns. */
static void add_inputs(AttentionGraph *g)
{
    const AttentionKey *k = g->key;
    g->q_at = per_document(g, ATT_Q_AT, k->B + 1);
    g->k_at = per_document(g, ATT_K_AT, k->B + 1);
    g->v_at = per_document(g, ATT_V_AT, k->B + 1);
    g->y_at = per_document(g, ATT_Y_AT, k->B + 1);
    g->lse_at = per_document(g, ATT_LSE_AT, k->B + 1);
    g->queries = per_document(g, ATT_QUERIES, k->B);
    g->keys = per_document(g, ATT_KEYS, k->B);
    g->q = rows(g, ATT_Q, k->H, k->q_width, g->q_at);
    g->k = columns(g, ATT_K, k->K, k->kv_width, g->k_at);
    g->v = (k->backward ? columns : rows)(g, ATT_V, k->K, k->kv_width, g->v_at);
    g->y = rows(g, ATT_Y, k->H, k->all_H * k->D, g->y_at);
    g->lse = stored_per_query(g, ATT_LSE, k->all_H);
    g->scale = scalar(g, ATT_SCALE);
    g->minus_infinity = scalar(g, ATT_MINUS_INFINITY);
}

/* x where the condition holds, else minus infinity. */
static Desc keep_where(AttentionGraph *g, Desc x, Desc condition)
{
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, scores(g, CUDNN_DATA_FLOAT), x,
                     g->minus_infinity, condition);
}

static Desc compare(AttentionGraph *g, cudnnPointwiseMode_t mode, Desc a, Desc b)
{
    return pointwise(g, mode, CUDNN_DATA_BOOLEAN, scores(g, CUDNN_DATA_BOOLEAN), a, b, NULL);
}

/* With documents: scores of queries and keys behind the document's end become minus infinity. */
static Desc mask_padding(AttentionGraph *g, Desc x)
{
    if (!g->key->tokens)
        return x;
    Desc query = position(g, x, 2, CUDNN_DATA_INT32), key = position(g, x, 3, CUDNN_DATA_INT32);
    Desc query_exists = compare(g, CUDNN_POINTWISE_CMP_LT, query, g->queries);
    Desc key_exists = compare(g, CUDNN_POINTWISE_CMP_LT, key, g->keys);
    return keep_where(g, x, compare(g, CUDNN_POINTWISE_LOGICAL_AND, query_exists, key_exists));
}

static Desc mask_causal(AttentionGraph *g, Desc x)
{
    Desc query = position(g, x, 2, CUDNN_DATA_FLOAT), key = position(g, x, 3, CUDNN_DATA_FLOAT);
    return keep_where(g, x, compare(g, CUDNN_POINTWISE_CMP_GE, query, key));
}

/* With a window: scores of keys with key + window <= query become minus infinity too. NOTE: written as cudnn-frontend's
 * diagonal_band_mask.h writes it, sum in F32 included; it warns that other forms may be correct but slow. */
static Desc mask_window(AttentionGraph *g, Desc x)
{
    if (!g->key->window)
        return x;
    Desc query = position(g, x, 2, CUDNN_DATA_FLOAT), key = position(g, x, 3, CUDNN_DATA_FLOAT);
    Desc reach = on_scores(g, CUDNN_POINTWISE_ADD, key, scalar(g, ATT_WINDOW));
    return keep_where(g, x, compare(g, CUDNN_POINTWISE_CMP_GT, reach, query));
}

/* scale q.k */
static Desc scaled_scores(AttentionGraph *g)
{
    Desc s = scores(g, CUDNN_DATA_FLOAT);
    product(g, s, g->q, g->k, g->queries, g->keys, NULL);
    return on_scores(g, CUDNN_POINTWISE_MUL, s, g->scale);
}

/* y = softmax(scale q.k) v, lse = max + log sum exp(. - max) */
static void describe_forward(AttentionGraph *g)
{
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    Desc s = mask_window(g, mask_causal(g, mask_padding(g, scaled_scores(g))));
    Desc top = reduce(g, CUDNN_REDUCE_TENSOR_MAX, per_query(g), s);
    Desc e = on_scores(g, CUDNN_POINTWISE_EXP, on_scores(g, CUDNN_POINTWISE_SUB, s, top), NULL);
    Desc sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, per_query(g), e);
    Desc log_sum = pointwise(g, CUDNN_POINTWISE_LOG, f32, per_query(g), sum, NULL, NULL);
    pointwise(g, CUDNN_POINTWISE_ADD, f32, g->lse, top, log_sum, NULL);
    Desc p = pointwise(g, CUDNN_POINTWISE_DIV, f32, scores(g, CUDNN_DATA_BFLOAT16), e, sum, NULL);
    product(g, g->y, p, g->v, g->queries, NULL, g->keys);
}

/* Room for one of backward's own buffers behind the others. */
static void place(AttentionGraph *g, AttentionName name, int64_t bytes)
{
    g->at[name] = g->bytes;
    g->bytes += (bytes + 255) / 256 * 256;
}

/* out (B, K, T, D) = a b (B, H, T, D), summed over the query heads that share a key/value head. With documents
 * `heads` names the buffer of the products before that sum; their offsets are `at` times the ratio of the strides. */
static void key_gradient(AttentionGraph *g, AttentionName out, AttentionName heads, Desc at, Desc a, Desc b)
{
    const AttentionKey *k = g->key;
    const int64_t group = k->H / k->K;
    Desc sum = rows(g, out, k->K, k->kv_width, at), full;
    if (group == 1) {
        product(g, sum, a, b, g->keys, NULL, g->queries);
        return;
    }
    if (k->tokens) {
        full = rows(g, heads, k->H, k->kv_width * group, at);
        place(g, heads, 2 * k->tokens * k->kv_width * group);
    } else {
        const int64_t H = k->H, T = k->T, D = k->D;
        Dims dims = {{ k->B, H, T, D }}, strides = {{ H * T * D, T * D, D, 1 }};
        full = tensor(g, ATT_VIRTUAL, CUDNN_DATA_BFLOAT16, dims, strides, NULL);
    }
    product(g, full, a, b, g->keys, NULL, g->queries);
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, sum, full);
}

/* dq = ds k. NOTE: cuDNN's faster plan sums dq with float atomics: other bits in every run. This one stores all of ds for a
 * second pass, 2 H T^2 bytes a sequence, and takes 4-7 % more time (0.3 % of a Llama-2-7B step): worth a resume that
 * repeats every bit. */
static void query_gradient(AttentionGraph *g, Desc ds)
{
    const AttentionKey *k = g->key;
    Desc dq = rows(g, ATT_DQ, k->H, k->q_width, g->q_at);
    Desc keys = reshape(g, rows(g, ATT_VIRTUAL, k->K, k->kv_width, g->k_at), g->k);
    product(g, dq, ds, keys, g->queries, NULL, g->keys);
}

/* p = exp(scale q.k - lse), dv = p^T dy, ds = p (dy.v - delta) scale, dk = ds^T q, dq = ds k; delta = dy . y */
static void describe_backward(AttentionGraph *g)
{
    const AttentionKey *k = g->key;
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    const int64_t H = k->H, T = k->T, D = k->D;
    Desc dy = rows(g, ATT_DY, H, k->all_H * D, g->y_at);

    Dims dims = {{ k->B, H, T, D }}, strides = {{ H * T * D, T * D, H * D, 1 }};
    Desc products = tensor(g, ATT_VIRTUAL, f32, dims, strides, NULL);
    pointwise(g, CUDNN_POINTWISE_MUL, f32, products, dy, g->y, NULL);
    Desc row_sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, per_query(g), products);
    const int64_t delta_H = k->tokens ? k->all_H : H;       /* lse_at counts in all_H */
    Desc delta = stored_per_query(g, ATT_DELTA, delta_H);
    pointwise(g, CUDNN_POINTWISE_MUL, f32, delta, row_sum, scalar(g, ATT_ONE), NULL);
    place(g, ATT_DELTA, 4 * delta_H * (k->tokens ? k->tokens : k->B * T));

    Desc s = mask_padding(g, scaled_scores(g));
    Desc e = mask_window(g, mask_causal(g, on_scores(g, CUDNN_POINTWISE_SUB, s, g->lse)));
    Desc prob = on_scores(g, CUDNN_POINTWISE_EXP, e, NULL);
    key_gradient(g, ATT_DV, ATT_DV_HEADS, g->v_at, reshape(g, scores_transposed(g), prob), dy);

    Desc dp = scores(g, f32);
    product(g, dp, dy, g->v, g->queries, g->keys, NULL);
    Desc ds = on_scores(g, CUDNN_POINTWISE_MUL, on_scores(g, CUDNN_POINTWISE_SUB, dp, delta), prob);
    ds = on_scores(g, CUDNN_POINTWISE_MUL, ds, g->scale);
    key_gradient(g, ATT_DK, ATT_DK_HEADS, g->k_at, reshape(g, scores_transposed(g), ds), g->q);
    query_gradient(g, ds);
}

void attention_describe(AttentionGraph *g, const AttentionKey *key)
{
    *g = (AttentionGraph){ .key = key, .next_virtual = ATT_VIRTUAL };
    for (int i = 0; i < ATT_NAMES; i++)
        g->at[i] = -1;
    add_inputs(g);
    if (key->backward)
        describe_backward(g);
    else
        describe_forward(g);
}
