/* GPTQ: the weights of a linear layer in 4 bits, chosen so that its outputs change least [Frantar
 * et al. 2022, arXiv 2210.17323].
 *
 * W (O,I) becomes scale * code: a scale for each `group` consecutive columns of a row, codes from
 * -8 to 7. H is the sum of xT x over the inputs x (1,I) of the layer, with damping on the diagonal.
 * The error of the outputs is the sum of e H eT over the rows e of W - scale * code. Columns get
 * their codes one after the other; each compensates the errors of the columns before it:
 *
 *     H = C CT, C upper triangular: e H eT = |e C|^2 = sum over j of C_jj^2 (t_j - s_j code_j)^2
 *     t_j = w_j + (sum over k < j of e_k C_kj) / C_jj,  code_j = round(t_j / s_j),  e_j = w_j - s_j code_j
 *
 * The published form finds the same codes from the inverse of H, with four times the work [LDLQ:
 * Chee et al. 2023, arXiv 2307.13304, has the proof]. `ordered`: columns are taken by falling H_jj,
 * those with the most expensive errors first; scales belong to columns in stored order. DIFFERS: a
 * column whose input was always 0 is rounded to nearest, not set to 0. The outputs for these inputs
 * are the same. */
#pragma once
#include "kernels/tensor.h"

enum { GPTQ_COLUMNS = 128 }; /* columns per block: one kernel does them */

typedef struct {
    /* added to H's diagonal, as a fraction of its mean; 0: no damping made H positive definite, and
     * weights were rounded to the nearest code */
    double damping;
    /* error of the outputs with these codes, and with rounding to nearest; NAN if damping is 0 */
    double error, rounded;
} GptqResult;

/* codes and values (O,I) = code and scale * code of w (O,I), whose scales are scale (O,I/group). h
 * (I,I): the sum of xT x; damping times its mean diagonal is added to the diagonal. If that is not
 * enough, damping is multiplied by ten, up to three times. w, h and scales in F32; values in F32 or
 * BF16; codes, scale: device memory. Allocates 8 I^2 + 8 O I bytes of device memory. Waits for the
 * device. */
GptqResult gptq(int8_t *codes, Tensor values, Tensor w, const float *scale, int group, Tensor h,
                double damping, bool ordered);

/* ---- its operations; F32 unless stated otherwise --------------------------------------------- */

/* diagonal[i] = h(i,i). h (I,I) */
void gptq_diagonal(float *diagonal, Tensor h);

/* m(i,j) = -h(order[i], order[j]), less `damping` on the diagonal. m, h (I,I) */
void gptq_damp(Tensor m, Tensor h, const int *order, float damping);

/* Rows of CT; called from the last rows to the first. c, m (R,I): rows first .. first + R - 1 of CT
 * and of m, R <= GPTQ_COLUMNS, where m is -H plus xT x of all later rows x of CT. Row j has C_kj
 * for k <= j, else 0. *failed = 1 if H is not positive definite, else unchanged. */
void gptq_factor(Tensor c, int *failed, Tensor m, int first);

/* W, and the order in which its columns are taken. */
typedef struct {
    Tensor w;           /* (O,I) */
    const float *scale; /* (O,I/group) */
    int group;
    const int *order; /* (I): numbers of columns */
} GptqWeights;

/* Columns first .. first + count - 1 in the order taken: written to e (O,I) at that position, to
 * codes q and values (O,I) at the stored position. sums (O,count): the sum of e_k C_kj over all k <
 * first; c (count,I): rows of CT. Without c and sums: rounds to nearest. */
void gptq_columns(int8_t *q, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c,
                  int first, int count);

/* ---- for both back ends ---------------------------------------------------------------------- */

/* Die if arguments of these operations are invalid. */
void gptq_check_f32(const char *op, Tensor t, int rows, int cols);
void gptq_check_rows(const char *op, Tensor m, int first);
void gptq_check_columns(const char *op, Tensor values, Tensor e, GptqWeights w, Tensor sums,
                        Tensor c, int first, int count);
