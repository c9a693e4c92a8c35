#include "model/calibrate/weights_ahead.h"

#include <stdlib.h>

#include "kernels/runtime/error.h"

static void *read_unit(void *ahead)
{
    WeightsAhead *a = ahead;
    UnitLayout shape;
    unit_shape(&shape, a->model, a->unit, 1);
    HfTensor *tensor = hf_tensors(a->model, &shape, a->unit, &a->count);
    a->weight = xcalloc((size_t)a->count + 1, sizeof *a->weight);
    for (int i = 0; i < a->count; i++) {
        const HfTensor *t = &tensor[i];
        Weight *w = &a->weight[i];
        *w = (Weight){ .tensor = *t, .values = xmalloc(t->rows * t->cols * sizeof *w->values) };
        export_read(a->x, t->name, w->values);
        if (!shape.param[t->param].is_operand)
            continue;
        w->scale = xmalloc(t->rows * t->cols / a->x->coded.group * sizeof *w->scale);
        coded_int4_scales(w->scale, a->x->coded, w->values, t->rows, t->cols);
    }
    free(tensor);
    free(shape.param);
    return NULL;
}

void weights_begin(WeightsAhead *a, int unit)
{
    a->unit = unit;
    CHECK(pthread_create(&a->thread, NULL, read_unit, a) == 0,
          "cannot start the thread that reads weights");
    a->is_reading = true;
}

void weights_wait(WeightsAhead *a)
{
    if (a->is_reading)
        pthread_join(a->thread, NULL);
    a->is_reading = false;
}

void weights_free(WeightsAhead *a)
{
    for (int i = 0; i < a->count; i++) {
        free(a->weight[i].values);
        free(a->weight[i].scale);
    }
    free(a->weight);
    a->weight = NULL;
    a->count = 0;
}
