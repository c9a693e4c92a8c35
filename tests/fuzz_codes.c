#include "tests/fuzz_codes.h"

#include "kernels/runtime/text.h"
#include "model/checkpoint/safetensors.h"
#include "tests/exported.h"
#include "tests/saved.h"

/* Stores the tensors of a matrix (O, I) as words of eight codes, with a scale for each output, in
 * the layout of packed-quantized or GPTQ. */
static void add_words(SafeFile *to, const SafeTensor *t, bool gptq)
{
    const size_t O = t->shape[0], I = t->shape[1];
    const struct {
        const char *name, *dtype;
        int dims;
        size_t shape[2];
    } tensors[2][5] = {
        { { "weight_packed", "I32", 2, { O, I / 8 } },
          { "weight_scale", "BF16", 2, { O, 1 } },
          { "weight_shape", "I64", 1, { 2 } } },
        { { "qweight", "I32", 2, { I / 8, O } },
          { "scales", "F16", 2, { 1, O } },
          { "qzeros", "I32", 2, { 1, O / 8 } },
          { "g_idx", "I32", 1, { I } } },
    };
    for (int i = 0; tensors[gptq][i].name; i++)
        safetensors_add(to,
                        text("%.*s%s", (int)(strlen(t->name) - strlen("weight")), t->name,
                             tensors[gptq][i].name),
                        tensors[gptq][i].dtype, tensors[gptq][i].dims, tensors[gptq][i].shape);
}

/* Every word consists of sevens, the zero point of GPTQ. Read as a scale, such a word is finite. */
static void fill_words(SafeFile *to, const SafeTensor *t)
{
    const size_t bytes = t->end - t->begin;
    int64_t *data = xcalloc(bytes / 8 + 1, 8);
    if (text_ends_with(t->name, "weight_shape")) {
        const SafeTensor *codes = safetensors_find(
            to, text("%.*spacked", (int)(strlen(t->name) - strlen("shape")), t->name));
        data[0] = (int64_t)codes->shape[0];
        data[1] = (int64_t)codes->shape[1] * 8;
    } else if (!text_ends_with(t->name, "g_idx"))
        memset(data, strstr(t->dtype, "16") ? 0x37 : 0x77, bytes);
    CHECK(safetensors_write(to, t, 0, data, bytes), "%s", to->problem);
    free(data);
}

/* Writes the weights at `path` with their matrices as words of codes; returns the path of the new
 * file. */
static const char *write_words(const char *path, bool gptq)
{
    SafeFile *from = safetensors_open(path), *to = safetensors_new(text("%s.words", path));
    for (int i = 0; i < from->count; i++)
        if (text_ends_with(from->tensor[i].name, "_proj.weight"))
            add_words(to, &from->tensor[i], gptq);
        else
            safetensors_add(to, from->tensor[i].name, from->tensor[i].dtype, from->tensor[i].dims,
                            from->tensor[i].shape);
    safetensors_lay_out(to);
    safetensors_create(to);
    for (int i = 0; i < to->count; i++)
        fill_words(to, &to->tensor[i]);
    const char *written = text("%s", to->path);
    safetensors_close(from);
    safetensors_close(to);
    return written;
}

void fuzz_codes(Input seed[FUZZ_CODES], const char *folder)
{
    static const struct {
        const char *dtype;
        int layout;
    } formats[] = {
        { "fp8", NOT_GIVEN },
        { "int8", NOT_GIVEN },
        { "int8", AS_BITSANDBYTES },
        { "nf4", NOT_GIVEN },
    };
    for (int i = 0; i < 4; i++) {
        ExportOptions o = export_options_of(text("%s/step1", folder), NULL,
                                            text("%s/%d", folder, i), formats[i].dtype);
        o.layout = formats[i].layout;
        export_to(&o, CHECKPOINT_FILE_BYTES);
        seed[i] = input_read(text("%s/%d/model.safetensors", folder, i));
    }
    for (int gptq = 0; gptq < 2; gptq++)
        seed[4 + gptq] = input_read(write_words(text("%s/step1/model.safetensors", folder), gptq));
}
