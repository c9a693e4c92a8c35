/* GPTQ: the weights of a linear layer in 4 bits, chosen so that its outputs change least [Frantar
 * et al. 2022, arXiv 2210.17323].
 *
 * W (O,I) becomes scale * code: a scale for each `group` consecutive columns of a row, codes from
 * -8 to 7. H is the sum of xT x over the inputs x (1,I) of the layer, with damping on the diagonal.
 * The error of the outputs is the sum of e H eT over the rows e of W - scale * code. Columns get
 * their codes one after the other. Each column compensates the errors of the columns before it:
 *
 *     H = C CT, C upper triangular: e H eT = |e C|^2 = sum over j of C_jj^2 (t_j - s_j code_j)^2
 *     t_j = w_j + (sum over k < j of e_k C_kj) / C_jj,  code_j = round(t_j / s_j),  e_j = w_j - s_j code_j
 *
 * The published form finds the same codes from the inverse of H, with four times the work [LDLQ:
 * Chee et al. 2023, arXiv 2307.13304, has the proof]. With `ordered`, columns are taken in the
 * order of falling H_jj, so columns with the most expensive errors come first. Scales belong to
 * columns in stored order. DIFFERS: a column whose input was always 0 is rounded to nearest; GPTQ
 * sets it to 0. The outputs for these inputs are the same. */
#pragma once
#include "kernels/tensor.h"

enum { GPTQ_COLUMNS = 128 }; /* columns per block; one kernel computes a block */

typedef struct {
    /* damping added to H's diagonal, as a fraction of the diagonal's mean; 0: no damping made H
     * positive definite, and weights were rounded to the nearest code */
    double damping;
    /* error: error of the outputs with these codes. rounded: error with weights rounded to nearest.
     * Both are NAN if damping is 0 */
    double error, rounded;
} GptqResult;

/* Quantizes w (O,I) with the scales `scale` (O,I/group). Writes the codes to `codes` (O,I), and
 * scale * code to `values` (O,I). h (I,I) is the sum of xT x. Adds damping * mean(diagonal of h) to
 * the diagonal of h. If h then has no Cholesky factor, multiplies damping by ten, up to three
 * times. w, h and scale are F32; values is F32 or BF16; codes and scale are in device memory.
 * Allocates 8 I^2 + 8 O I bytes of device memory. Waits for the device. */
GptqResult gptq(int8_t *codes, Tensor values, Tensor w, const float *scale, int group, Tensor h,
                double damping, bool ordered);

/* ---- operations of GPTQ; F32 unless stated otherwise ----------------------------------------- */

/* diagonal[i] = h(i,i). h is (I,I). */
void gptq_diagonal(float *diagonal, Tensor h);

/* m(i,j) = -h(order[i], order[j]), minus `damping` on the diagonal. m and h are (I,I). */
void gptq_damp(Tensor m, Tensor h, const int *order, float damping);

/* Computes rows of CT. The caller starts with the last rows. c and m are (R,I): rows first ..
 * first + R - 1 of CT and of a matrix M, with R <= GPTQ_COLUMNS. M is -H plus the xT x of all later
 * rows x of CT. Row j of c has C_kj for k <= j, else 0. *failed becomes 1 if H is not positive
 * definite; else it does not change. */
void gptq_factor(Tensor c, int *failed, Tensor m, int first);

/* W, its scales, and the order in which its columns are taken. */
typedef struct {
    Tensor w;           /* (O,I) */
    const float *scale; /* (O,I/group) */
    int group;
    const int *order; /* (I): column numbers, in the order taken */
} GptqWeights;

/* Chooses the codes of columns first .. first + count - 1 of the order. Writes W - scale * code to
 * e (O,I) at the column's position in the order, and codes q and values (O,I) at its stored
 * position. sums (O,count): the sum of e_k C_kj over all k < first. c (count,I): rows of CT.
 * Without c and sums it rounds to nearest. */
void gptq_columns(int8_t *q, Tensor values, Tensor e, GptqWeights w, Tensor sums, Tensor c,
                  int first, int count);

/* ---- for both back ends ---------------------------------------------------------------------- */

/* Both functions die if arguments of these operations are invalid. */
void gptq_check_f32(const char *op, Tensor t, int rows, int cols);
void gptq_check_rows(const char *op, Tensor m, int first);
void gptq_check_columns(const char *op, Tensor values, Tensor e, GptqWeights w, Tensor sums,
                        Tensor c, int first, int count);
