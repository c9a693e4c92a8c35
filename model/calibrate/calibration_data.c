#include "model/calibrate/calibration_data.h"

#include <stdlib.h>
#include <string.h>

#include "data/loader.h"
#include "kernels/runtime/error.h"
#include "model/config/export_options.h"
#include "model/config/load_folder.h"
#include "model/formats/hf.h"

/* LONGEST: maximum of the default number of tokens per sequence. HELD_OUT: number of calibration
 * sequences for each held-out sequence */
enum { LONGEST = 2048, HELD_OUT = 16 };
static const char key[] = "--calibration";

/* Bytes of a token: the option, else data.memmap_dtype of the exported run, else the default of
 * this key. */
static int token_bytes(const ExportOptions *o, const Export *x)
{
    char *trained = o->token_bytes == NOT_GIVEN
                        ? load_folder_trained_with(x->folder, "data.memmap_dtype")
                        : NULL;
    const int bytes = o->token_bytes != NOT_GIVEN                 ? o->token_bytes
                      : trained && strcmp(trained, "uint32") == 0 ? UINT32
                                                                  : UINT16;
    free(trained);
    return bytes;
}

static void read_sequences(CalibrationData *d, Loader *l)
{
    const size_t T = (size_t)d->length;
    for (int i = 0; i < d->sequences + d->held; i++) {
        Batch b;
        if (!loader_next(l, &b))
            die("%s: the files have fewer sequences than when they were opened", key);
        memcpy(d->tokens + (size_t)i * T, b.tokens, T * sizeof *d->tokens);
        memcpy(d->targets + (size_t)i * T, b.targets, T * sizeof *d->targets);
    }
}

CalibrationData calibration_read(const ExportOptions *o, const Export *x)
{
    ModelConfig m = { 0 };
    hf_read(&m, x->base);
    const int most = m.max_sequence_length < LONGEST ? m.max_sequence_length : LONGEST;
    CalibrationData d = { .sequences = o->sequences, .length = o->length > 0 ? o->length : most };
    d.held = d.sequences < HELD_OUT ? 1 : d.sequences / HELD_OUT;
    if (d.length > m.max_sequence_length)
        die("--calibration_length=%d: expected at most %d, the length of the model's sequences",
            d.length, m.max_sequence_length);
    const DataSpec spec = { .key = key,
                            .paths = o->calibration,
                            .num_paths = o->num_calibration,
                            .itemsize = token_bytes(o, x),
                            .sequence_length = d.length,
                            .vocab_size = m.vocab_size,
                            .eos_token_id = -1,
                            .pad_token_id = -1,
                            .shuffle = true,
                            .drop_last = true };
    const int all = d.sequences + d.held;
    Loader *l = loader_open(&spec, 1, 0, 1);
    if (loader_instances(l) < (uint64_t)all)
        die("%s: the files have %llu sequences of %d tokens, but %d for calibration and %d held "
            "out are needed; give more files, "
            "fewer --calibration_sequences or a smaller --calibration_length",
            key, (unsigned long long)loader_instances(l), d.length, d.sequences, d.held);
    d.tokens = xmalloc(sizeof *d.tokens * (size_t)all * (size_t)d.length);
    d.targets = xmalloc(sizeof *d.targets * (size_t)all * (size_t)d.length);
    d.files = loader_files(l);
    loader_limit(l, (uint64_t)all);
    read_sequences(&d, l);
    loader_close(l);
    return d;
}

void calibration_free(CalibrationData *d)
{
    free(d->tokens);
    free(d->targets);
}
