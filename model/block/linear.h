/* The linear layers of a block: a matrix, perhaps a bias, perhaps an adapter (LoRA). */
#pragma once
#include "model/shape/buffers.h"

/* A block at work on the tokens of a micro-batch, or on a tile of them. */
typedef struct {
    const Stream *stream;
    const UnitTensors *w, *dw;   /* weights; in backward their gradients */
    const Acts *a, *next;        /* this block's activations, and the next one's */
    const BackwardScratch *work; /* backward only */
} Block;

/* What a linear layer has: a matrix, perhaps a bias, perhaps an adapter (LoRA) with the matrices a
 * and b; or their gradients. What is missing, or not trained, has no data. */
typedef struct {
    Tensor matrix, bias;
    LoraMatrix a, b;
} LinearParams;

/* A linear layer at work: y = x matrix^T [+ bias] [+ scale * (x a^T) b^T]. */
typedef struct {
    LinearParams w, dw;
    Tensor xa,
        dxa; /* scale * x a^T, and backward's gradient of it; no tensors without an adapter */
    float scale;
    Tensor folded; /* the matrix with the factors of the columns of an operand that has some */
} LinearLayer;

LinearLayer linear_layer(const Block *b, Linear l);

/* An FP8 operand has rows, which forward reads, and a transpose, which backward reads. */
Tensor linear_rows(Tensor t);
Tensor linear_transpose(Tensor t);

bool linear_has_adapter(const LinearLayer *l);
bool linear_trains_matrix(const LinearLayer *l);

/* y = x w^T [+ add], and the adapter's part. y (N, O), x (N, C). */
void linear(const LinearLayer *l, Tensor y, Tensor x, Tensor add);
/* The same for a layer whose output goes into an operation that can add: y = x w^T [+ bias], and
 * returns what that operation is to add while it reads y. So y is written once, and read once. */
LoraProduct linear_defer_adapter(const LinearLayer *l, Tensor y, Tensor x);

/* dx = [dx +] dy w, and the adapter's part. Leaves the gradient of the adapter's product for
 * linear_dw, as the others do. */
void linear_dx(const LinearLayer *l, Tensor dx, Tensor dy, bool accumulate);
LoraProduct linear_dx_defer_adapter(const LinearLayer *l, Tensor dx, Tensor dy);
void linear_dxa(const LinearLayer *l, Tensor dy); /* without dx */

/* What linear_dw reads of the layer's input x: its transpose if the matrix is trained, its rows if
 * only the adapter is, no tensor if neither; what is not read need not be made. */
Tensor linear_input(const LinearLayer *l, Tensor x);

/* dw += dy^T x, the same for the bias, and for the adapter's A and B. After one of linear_dx,
 * linear_dx_defer_adapter and linear_dxa. */
typedef struct {
    const LinearLayer *l;
    Tensor dy, x;
} LinearGrad;
void linear_dw(LinearGrad g);

/* The adapter's product again: what linear left in `xa`. */
void linear_recompute_xa(const LinearLayer *l, Tensor x);
