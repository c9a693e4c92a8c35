/* A file of adapters of all experts of a block in one tensor, as PEFT writes it. */
#pragma once
#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "model/checkpoint/safetensors.h"

enum { EXPERTS = 3, R = 2, WIDTH = 4, HIDDEN = 5 };

/* Adds a tensor of whole numbers. */
static inline void put_numbers(SafeFile *f, const char *name, size_t rows, size_t cols,
                               bool (*is_zero)(size_t, size_t))
{
    float *x = malloc(rows * cols * sizeof *x);
    for (size_t i = 0; i < rows * cols; i++)
        x[i] = is_zero && is_zero(i / cols, i % cols) ? 0 : (float)(i * 37 % 11) - 5;
    CHECK(safetensors_write(f, safetensors_find(f, name), 0, x, rows * cols * sizeof *x), "%s",
          f->problem);
    free(x);
}

/* where the joined B of gate and up must be 0 */
static inline bool off_block(size_t row, size_t column)
{
    return row / HIDDEN != column / EXPERTS / R;
}

#define STACKED "layers.0.mlp.experts."

/* Writes the file, and opens it. ranks: of an expert's joined adapter of gate and up. */
static inline SafeFile *write_stacked(const char *path, size_t ranks,
                                      bool (*is_zero)(size_t, size_t))
{
    const struct {
        const char *name;
        size_t rows, cols;
    } tensors[] = { { STACKED "base_layer.lora_A.weight", ranks * EXPERTS, WIDTH },
                    { STACKED "base_layer.lora_B.weight", 2 * HIDDEN, ranks * EXPERTS },
                    { STACKED "lora_A.weight", R * EXPERTS, HIDDEN },
                    { STACKED "lora_B.weight", WIDTH, R * EXPERTS },
                    { "q_proj.lora_A.weight", R, WIDTH } };
    SafeFile *f = safetensors_new(path);
    for (int i = 0; i < 5; i++)
        safetensors_add(f, tensors[i].name, "F32", 2,
                        (size_t[]){ tensors[i].rows, tensors[i].cols });
    safetensors_lay_out(f);
    safetensors_create(f);
    for (int i = 0; i < 5; i++)
        put_numbers(f, tensors[i].name, tensors[i].rows, tensors[i].cols, i == 1 ? is_zero : NULL);
    safetensors_close(f);
    return safetensors_open(path);
}
