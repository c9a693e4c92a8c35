/* Checks of arguments, which both back ends make on entry of every operation. */
#pragma once
#include "kernels/collectives.h"
#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "kernels/wire.h"

/* The name of the operation for messages: this function's name without "backend_". */
#define OPERATION operation_name(__func__)
const char *operation_name(const char *function);

/* Dies unless t exists, has this shape, and has a valid format. */
#define CHECK_TENSOR(t, rows, cols) check_tensor(OPERATION, #t, t, rows, cols)
void check_tensor(const char *op, const char *name, Tensor t, int rows, int cols);

/* As CHECK_TENSOR, but t may be absent (data NULL). */
#define CHECK_OPTIONAL(t, rows, cols) \
    do { \
        if ((t).data) \
            check_tensor(OPERATION, #t, t, rows, cols); \
    } while (0)

/* Dies unless t is F32 or BF16, the formats of tensors that accumulate or change in place. */
#define CHECK_PLAIN(t) check_plain(OPERATION, #t, t)
void check_plain(const char *op, const char *name, Tensor t);

/* Checks the arguments of quantize_codes. y may have more rows than x only if y is FP8 with one
 * scale. */
void check_quantized(Tensor y, Tensor x);

/* Checks the arguments of quantize_item_scales and quantize_item_codes. */
void check_items(const char *op, Tensor y, Tensor x, int items);

/* Check the output of quantize_scale, the arguments of expand_operand, and the argument of
 * find_not_finite. */
void check_scaled(Tensor y);
void check_expand_operand(Tensor y, Tensor x);
void check_find_not_finite(Tensor x, bool negative);

/* Checks the gradient that cross_entropy_codes writes. */
void check_logit_codes(const char *op, Tensor gradient, Tensor logits);
/* Checks the arguments of operations that choose k columns of each row. */
void check_columns(const char *op, Tensor logits, int vocab, int k);
/* Checks the arguments of the operation distill. */
void check_soft_labels(const char *op, Tensor gradient, Tensor logits, int k, int vocab);

/* Checks that tensor cores can multiply a and b into `out`. Returns true if a and b are FP8. */
bool check_gemm(const char *op, Tensor out, Tensor a, Tensor b);

/* Dies unless t has the transposed copy that FP8 GEMMs read. */
void check_has_transpose(const char *op, const char *name, Tensor t);

/* Returns true if `add`, which matmul adds to y, is a bias. */
bool is_bias(Tensor add, Tensor y);

/* Checks the arguments of the three GEMMs of a linear layer. Returns true if the operands are
 * FP8. */
bool check_matmul(Tensor y, Tensor x, Tensor w, Tensor add);
bool check_matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate);
bool check_matmul_dw(Tensor dw, Tensor dy, Tensor x);

/* Checks the arguments of fold_channels. */
void check_fold_channels(Tensor y, Tensor w);

/* Checks the arguments of matmul_scaled and of Muon's operations. */
void check_matmul_scaled(Tensor y, Tensor x, Tensor w, Tensor add);
void check_matmul_symmetric(Tensor y, Tensor x, bool columns, Tensor add);
void check_muon_normalize(Tensor y, Tensor x);
void check_muon_momentum(Tensor u, Tensor m, Tensor grad);
void check_muon_apply(Tensor w, Tensor x);
void check_bf16(const char *op, const char *name, Tensor t);

/* Checks the arguments of matmul_db. */
void check_matmul_db(Tensor db, Tensor dy);

/* Checks the arguments of attention_forward. */
void check_attention(const char *op, Tensor y, Tensor qkv, Attention a, Documents docs);

/* Checks the arguments of heads_split and heads_join. Returns how many ranks share a key head. */
int check_exchange(const char *op, Tensor y, Tensor x, Attention heads);

/* Checks the arguments of comm_exchange. Returns the bytes of a row. */
size_t check_rows(const char *op, Tensor y, const RowRange *received, Tensor x,
                  const RowRange *sent, int items, Ranks g);

/* Check the arguments of wire_encode and wire_sum. */
void check_wire_encode(Tensor message, Tensor x, Wire w, WireScale s);
void check_wire_sum(Tensor y, Tensor x, Tensor messages, int ranks, int own, Wire w);

/* Checks the arguments of comm_alloc. */
void check_comm_alloc(const char *op, size_t bytes, MemoryUse use);

/* Checks the arguments of attention_cached. */
void check_cached(const char *op, Tensor y, Tensor qkv, KvCache cache, Attention a);

/* Checks the arguments of rope_forward and rope_backward. Returns true if q and k are normed head
 * by head. With one head this norm equals the norm over the full width. */
bool check_rope(const char *op, Tensor qkv, Tensor qnorm, Tensor knorm, const void *stats,
                Attention a);

/* Checks the arguments of operations with adapters. m maps between `wide` (x or y) and `xa`; both
 * must exist. Returns the rank r of a projection. */
int check_lora_matrix(const char *op, LoraMatrix m, Tensor wide, Tensor xa);

/* Checks the arguments of lora_narrow, lora_widen and lora_dw. Each function returns the rank r of
 * a part. */
int check_lora_narrow(Tensor xa, Tensor x, LoraMatrix m);
int check_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add);
int check_lora_dw(LoraMatrix dm, Tensor xa, Tensor x);
