/* The linear layers of a block: a matrix, perhaps a bias, perhaps an adapter (LoRA). */
#pragma once
#include "model/shape/buffers.h"

/* A block at work on all tokens of a micro-batch, or on a tile of them. */
typedef struct {
    const Stream *stream;
    const UnitTensors *w, *dw;   /* weights; in backward their gradients */
    const Acts *a, *next;        /* this block's activations, and the next block's */
    const BackwardScratch *work; /* backward only */
} Block;

/* The parameters of a linear layer, or their gradients: a matrix, a bias, and the matrices a and b
 * of an adapter (LoRA). A parameter that does not exist, or a gradient that is not computed, has no
 * data. */
typedef struct {
    Tensor matrix, bias;
    LoraMatrix a, b;
} LinearParams;

/* A linear layer at work: y = x matrix^T [+ bias] [+ scale * (x a^T) b^T]. */
typedef struct {
    LinearParams w, dw;
    Tensor xa, dxa; /* xa = scale * x a^T, and its gradient; without an adapter they have no data */
    float scale;
    /* buffer for a copy of the matrix with its columns divided by the input's column factors */
    Tensor folded;
} LinearLayer;

LinearLayer linear_layer(const Block *b, Linear l);

/* An FP8 operand without its transpose, as forward reads it. */
Tensor linear_rows(Tensor t);
/* An FP8 operand with only its transpose, as backward reads it. */
Tensor linear_transpose(Tensor t);

bool linear_has_adapter(const LinearLayer *l);
bool linear_trains_matrix(const LinearLayer *l);

/* y = x w^T [+ add] + the adapter's product, with y (N, O) and x (N, C). */
void linear(const LinearLayer *l, Tensor y, Tensor x, Tensor add);
/* y = x w^T [+ bias]. Returns the adapter's product; the operation that reads y must add it. So y
 * is written once and read once. */
LoraProduct linear_defer_adapter(const LinearLayer *l, Tensor y, Tensor x);

/* dx = [dx +] dy w + the adapter's product. This function and the next two leave the gradient dxa
 * for linear_dw. */
void linear_dx(const LinearLayer *l, Tensor dx, Tensor dy, bool accumulate);
LoraProduct linear_dx_defer_adapter(const LinearLayer *l, Tensor dx, Tensor dy);
void linear_dxa(const LinearLayer *l, Tensor dy); /* computes only dxa, not dx */

/* Returns the part of the layer's input x that linear_dw reads: the transpose if the matrix is
 * trained, the rows if only the adapter is trained, else no tensor. Other copies of x need not be
 * computed. */
Tensor linear_input(const LinearLayer *l, Tensor x);

/* Adds the gradients of the matrix (dw += dy^T x), of the bias, and of the adapter's A and B. Call
 * it after linear_dx, linear_dx_defer_adapter or linear_dxa. */
typedef struct {
    const LinearLayer *l;
    Tensor dy, x;
} LinearGrad;
void linear_dw(LinearGrad g);

/* Recomputes `xa`, which linear computed in forward. */
void linear_recompute_xa(const LinearLayer *l, Tensor x);
