/* Continues the prompts one by one. All ranks run the same passes, each through the units of its
 * stage; a rank that has the head chooses the tokens. */
#include "model/run/generate.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/load.h"
#include "model/decode.h"
#include "model/formats/adapter.h"
#include "model/formats/file.h"
#include "model/formats/loadable.h"
#include "kernels/runtime/agree.h"
#include "model/plan_model.h"
#include "model/run/inputs.h"
#include "model/predict/memory.h"
#include "model/evaluate/open_data.h"
#include "model/run/router_report.h"
#include "model/run/run.h"
#include "model/sampling.h"
#include "model/parallel/stages.h"

enum { MOST_STOPS = 64 };

typedef struct {
    Config config; /* the configuration, with the sequence length that these prompts need */
    Model model;
    ParamStore store;
    Prompts prompts;
    ShownImages *images;             /* NULL: prompts show no images */
    const void **rows;               /* pointers to features, one for each token of a prompt */
    int stop[MOST_STOPS + 1], stops; /* tokens that end a text */
    float *logits;
    int *tokens; /* tokens of the continuation */
    double prefill_seconds, decode_seconds;
    long prefilled, decoded;
} Generator;

/* ---- which tokens end a text ----------------------------------------------------------------- */

static bool is_stop(const Generator *g, int token)
{
    for (int i = 0; i < g->stops; i++)
        if (g->stop[i] == token)
            return true;
    return false;
}

/* Reads "eos_token_id" of a file, a number or a list. Returns false if the file has none. */
static bool read_stops(Generator *g, const char *folder, const char *file)
{
    json_t *o = file_json(folder, file, 0), *eos = json_object_get(o, "eos_token_id");
    const size_t n = json_is_array(eos) ? json_array_size(eos) : eos && !json_is_null(eos);
    if (n > MOST_STOPS)
        die("%s/%s: eos_token_id lists %zu tokens; expected at most %d", folder, file, n,
            (int)MOST_STOPS);
    for (size_t i = 0; i < n; i++) {
        const json_t *token = json_is_array(eos) ? json_array_get(eos, i) : eos;
        if (!json_is_integer(token))
            die("%s/%s: eos_token_id: expected an integer or a list of integers", folder, file);
        g->stop[g->stops++] = (int)json_integer_value(token);
    }
    json_decref(o);
    return n > 0;
}

/* As in transformers' generate, generation_config.json comes before config.json. If a folder of
 * adapters names no eos, the eos of their base is used. model.eos_token_id is added if it is given.
 * Rank 0 reads the files, so that all ranks end at the same token. */
static void find_stops(Generator *g, const char *folder)
{
    const char *base = adapter_is(folder) ? g->config.model.lora.base_path : folder;
    const int eos = g->config.model.eos_token_id;
    const bool said = comm_rank() == 0 && (read_stops(g, folder, "generation_config.json") ||
                                           read_stops(g, base, "generation_config.json") ||
                                           read_stops(g, base, "config.json"));
    if (eos >= 0 && !is_stop(g, eos) && (!said || g->config.stops_at_eos))
        g->stop[g->stops++] = eos;
    comm_broadcast(&g->stops, sizeof g->stops, 0);
    comm_broadcast(g->stop, sizeof g->stop, 0);
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Limits caches and rotary tables to the length of the longest prompt with its continuation. */
static void set_length(Generator *g)
{
    ModelConfig *m = &g->config.model;
    const long wanted = (long)prompts_longest(&g->prompts) + g->config.max_new_tokens;
    if (wanted < m->max_sequence_length)
        m->max_sequence_length = (int)wanted;
    else if (wanted > m->max_sequence_length)
        warn("%s: a prompt with max_new_tokens %d is longer than model.max_sequence_length %d: the "
             "continuation ends there",
             g->config.generate, g->config.max_new_tokens, m->max_sequence_length);
}

static void open_generator(Generator *g, const Config *c)
{
    *g = (Generator){ .config = *c };
    const char *folder = c->load_folder;
    if (!folder)
        die("generate: there is no model; give a checkpoint or a Hugging Face folder: "
            "--load_path=FOLDER");
    inputs_agree(c);
    if (!c->continues)
        loadable_check(NULL, folder);
    inputs_read_prompts(&g->prompts, c->generate, &c->model,
                        c->generate_features ? NULL : "give them as --generate_features=FOLDER");
    if (c->generate_features)
        g->images = shown_images_open("generate_features", c->generate_features,
                                      c->model.image.rows, c->model.image.feature_size,
                                      g->prompts.image, g->prompts.first_image[g->prompts.count]);
    if (g->images)
        shown_images_check_tower(g->images, tower_of(c), tower_folder(c), false);
    set_length(g);
    memory_plan(&g->model, &g->store, &g->config);
    memory_check_host(&g->model, &g->store, &g->config);
    model_alloc(&g->model, &g->store, &g->config);
    TrainState state = { 0 };
    checkpoint_load(folder, &g->config, &g->store, &state, false);
    router_load_bias(&g->model.text, &state, folder);
    free(state.router_bias);
    find_stops(g, folder);
    g->logits = xmalloc(sizeof *g->logits * (size_t)c->model.vocab_size);
    g->tokens = xmalloc(sizeof *g->tokens * (size_t)g->config.model.max_sequence_length);
    g->rows = xmalloc(sizeof *g->rows * (size_t)g->config.model.max_sequence_length);
}

static void close_generator(Generator *g)
{
    model_free(&g->model, &g->store);
    shown_images_close(g->images);
    prompts_free(&g->prompts);
    free(g->rows);
    free(g->logits);
    free(g->tokens);
}

/* ---- one prompt ------------------------------------------------------------------------------ */

/* Appends `count` tokens and returns the next one, at `position`. */
static int next_token(Generator *g, const int *tokens, int count, int prompt, int position)
{
    const Config *c = &g->config;
    const Sampling s = { c->temperature, c->top_p, c->seed };
    int token = -1;
    stages_enter(&g->store);
    decode_append(&g->model, &g->store, tokens, count);
    if (g->model.has_head) {
        decode_logits(&g->model, &g->store, g->logits);
        token = sample_token(g->logits, c->model.vocab_size, &s,
                             ((uint64_t)prompt << 32) + (uint64_t)position);
    }
    watchdog_set_stage(-1);
    comm_broadcast(&token, sizeof token, stages_head_rank(&g->store));
    if (token < 0)
        die("prompt %d: a logit after token %d is not finite: the model has diverged, or its "
            "values overflow in recipe %s",
            prompt, position, c->recipe.name);
    return token;
}

static void use_images(Generator *g, int prompt)
{
    if (!g->images)
        return;
    const Prompts *p = &g->prompts;
    shown_images_rows(g->rows, g->images, p->token + p->start[prompt], prompts_length(p, prompt),
                      g->config.model.image.token_id, p->image + p->first_image[prompt]);
    model_use_images(&g->model, (ImageRows){ g->rows, shown_images_f32(g->images) ? F32 : BF16 });
}

/* Fills g->tokens. Returns the number of tokens. */
static int continue_prompt(Generator *g, int prompt)
{
    const int length = prompts_length(&g->prompts, prompt),
              most_new = g->config.model.max_sequence_length - length;
    const int most = most_new < g->config.max_new_tokens ? most_new : g->config.max_new_tokens;
    const double begin = clock_seconds();
    watchdog_mark("reading a prompt", -1);
    decode_begin(&g->model);
    use_images(g, prompt);
    int count = 0;
    g->tokens[count++] =
        next_token(g, g->prompts.token + g->prompts.start[prompt], length, prompt, length);
    const double first = clock_seconds();
    while (count < most && !is_stop(g, g->tokens[count - 1])) {
        watchdog_mark("generating", -1);
        g->tokens[count] = next_token(g, &g->tokens[count - 1], 1, prompt, length + count);
        count++;
    }
    g->prefill_seconds += first - begin;
    g->decode_seconds += clock_seconds() - first;
    g->prefilled += length;
    g->decoded += count - 1;
    return count;
}

static void print_continuation(const Generator *g, int prompt, int count)
{
    if (comm_rank() != 0)
        return;
    printf("{\"prompt\": %d, \"tokens\": [", prompt);
    for (int i = 0; i < count; i++)
        printf("%s%d", i ? ", " : "", g->tokens[i]);
    printf("], \"finish\": \"%s\"}\n", is_stop(g, g->tokens[count - 1]) ? "eos" : "length");
    if (fflush(stdout) != 0)
        die("stdout: cannot write the continuations: %m");
}

/* ---- speed ----------------------------------------------------------------------------------- */

/* The time of one pass over all weights that the computation of a token reads. It is measured with
 * a kernel that only searches for non-finite values. An untied embedding (unit 0) is left out: a
 * token reads only one of its rows. */
static double reading_seconds(const ParamStore *store, bool tied)
{
    DeviceMark *from = NULL, *to = NULL;
    for (int pass = 0; pass < 2; pass++) {
        from = device_mark(from);
        for (int u = tied ? 0 : 1; u < store->num_units; u++) {
            const Slice *s = store->shard[u].slice;
            const Tensor floats =
                tensor_at(s[QUANTIZED].stored.data, (Format){ F32, 0, false }, 1, 0);
            const Tensor codes = tensor_flat(floats, s[QUANTIZED].count / sizeof(float));
            if (s[FROZEN].count > 0)
                find_not_finite((int *)store->square_sum, s[FROZEN].stored, false);
            /* reads codes as floats, only to measure the time */
            if (s[QUANTIZED].count > 0)
                find_not_finite((int *)store->square_sum, codes, false);
        }
        to = device_mark(to);
    }
    const double seconds = 1e-3 * device_elapsed(from, to);
    device_unmark(from);
    device_unmark(to);
    return seconds;
}

static void print_speed(const Generator *g)
{
    const double reading = reading_seconds(&g->store, g->config.model.weight_tying);
    const double bytes = -agree_least(-(double)model_planned_bytes(&g->model, &g->store));
    if (comm_rank() != 0)
        return;
    fprintf(stderr,
            "prompts: %ld tokens, %.0f tokens/s; memory planned: at most %.2f GiB per rank\n",
            g->prefilled, (double)g->prefilled / g->prefill_seconds, bytes / (1 << 30));
    if (g->decoded == 0)
        return;
    const double seconds = g->decode_seconds / (double)g->decoded;
    fprintf(stderr, "continuations: %ld tokens after the first ones, %.3f ms each", g->decoded,
            1e3 * seconds);
    if (comm_size() == 1)
        fprintf(stderr, ", %.2f times a pass that only reads the weights (%.3f ms)",
                seconds / reading, 1e3 * reading);
    fputc('\n', stderr);
}

void generate(const Config *c)
{
    Generator g;
    watchdog_set_patient(true);
    watchdog_mark("opening the model", -1);
    run_check_device(c);
    open_generator(&g, c);
    watchdog_set_patient(false);
    error_hold_warnings(false);
    for (int i = 0; i < g.prompts.count; i++)
        print_continuation(&g, i, continue_prompt(&g, i));
    watchdog_mark_together("timing the weights", -1);
    print_speed(&g);
    close_generator(&g);
}
