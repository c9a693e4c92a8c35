/* GPTQ: the weights of a linear layer in 4 bits, chosen so that its outputs change least [Frantar et al. 2022, arXiv 2210.17323].
 *
 * W (O,I) becomes scale * code: a scale for each `group` consecutive columns of a row, codes from -8 to 7. H is the sum of xT x
 * over the inputs x (1,I) that the layer has had, and something on the diagonal. The error of the outputs is the sum of e H eT over the
 * rows e of W - scale * code. Columns get their codes one after the other, each for what the errors of those before it leave:
 *
 *     H = C CT, C upper triangular: e H eT = |e C|^2 = sum over j of C_jj^2 (t_j - s_j code_j)^2
 *     t_j = w_j + (sum over k < j of e_k C_kj) / C_jj,  code_j = round(t_j / s_j),  e_j = w_j - s_j code_j
 *
 * The published form has the same codes by way of the inverse of H, at four times the work [LDLQ: Chee et al. 2023, arXiv
 * 2307.13304, which proves it]. With an order, columns are taken by falling H_jj, which are those whose errors cost most; scales
 * belong to columns as they are stored.
 * DIFFERS: a column whose input has always been 0 is rounded to nearest, not set to 0; which is the same for these inputs. */
#pragma once
#include "kernels/tensor.h"

enum { GPTQ_COLUMNS = 128 };        /* that are taken at a time: what one kernel does */

typedef struct {
    double damping;                 /* that was added to H's diagonal, of its mean; 0: H was not positive definite with any, and
                                       codes are those to the nearest */
    double error, rounded;          /* the error of the outputs with these codes, and with those to the nearest; without damping
                                       NAN */
} GptqResult;

/* codes and values (O,I) = code and scale * code of w (O,I), whose scales are scale (O,I/group). h (I,I): the sum of xT x; damping
 * times its mean diagonal is added to the diagonal; where that is not enough, ten times as much, at most three times over. w, h and
 * scales in F32; values in F32 or BF16; codes, scale: device memory. Takes 8 I^2 + 8 O I bytes more of it. Waits for the device. */
GptqResult gptq(int8_t *codes, Tensor values, Tensor w, const float *scale, int group, Tensor h, double damping, bool ordered);

/* ---- its operations; F32 where nothing else is said ---------------------------------------------------------- */

/* diagonal[i] = h(i,i). h (I,I) */
void gptq_diagonal(float *diagonal, Tensor h);

/* m(i,j) = -h(order[i], order[j]), less `damping` on the diagonal. m, h (I,I) */
void gptq_damp(Tensor m, Tensor h, const int *order, float damping);

/* Rows of the transpose of C, from the last ones to the first: c, m (R,I) are rows first .. of CT and of m, R up to GPTQ_COLUMNS, and m
 * is -H plus xT x of all rows x of CT after these. Row j has C_kj for k <= j, else 0. *failed = 1 if H is not positive definite, else
 * it stays. */
void gptq_factor(Tensor c, int *failed, Tensor m, int first);

/* W, and in which order its columns are taken. */
typedef struct {
    Tensor       w;                 /* (O,I) */
    const float *scale;             /* (O,I/group) */
    int          group;
    const int   *order;             /* (I): their numbers */
} GptqWeights;

/* Columns first .. first + count - 1, as they are taken, of e (O,I), and the same of codes q and values (O,I), where they are
 * stored. sums (O,count): the sum of e_k C_kj over all k < first; c (count,I): rows of CT. No c, no sums: to the nearest. */
void gptq_columns(int8_t *q, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c, int first, int count);

/* ---- for both back ends -------------------------------------------------------------------------------------- */

/* Die unless the arguments of these operations are what they have to be. */
void gptq_check_f32    (const char *op, Tensor t, int rows, int cols);
void gptq_check_rows   (const char *op, Tensor m, int first);
void gptq_check_columns(const char *op, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c, int first, int count);
