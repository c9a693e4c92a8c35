/* All ranks run the same number of passes, because gathering units is collective: a rank without
 * sequences runs masked sequences. */
#include "model/evaluate/evaluate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/hash.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/watchdog_marks.h"
#include "kernels/runtime/agree.h"
#include "model/evaluate/downstream.h"
#include "model/evaluate/open_data.h"
#include "model/evaluate/reference.h"

/* Sequences [first, first + B) of the batch as one micro-batch. Sequences after the end of the
 * batch are masked. */
static void micro_batch(int *tokens, int *targets, uint8_t *begins, const void **images,
                        const Batch *b, int first, int B, int T)
{
    int n = b->sequences - first;
    n = n < 0 ? 0 : n < B ? n : B;
    memset(tokens, 0, sizeof(int) * B * T);
    memset(begins, 0, (size_t)B * T);
    for (int i = 0; i < B * T; i++)
        targets[i] = -1;
    for (int i = 0; i < B * T && b->images; i++)
        images[i] = i < n * T ? b->images[(size_t)first * T + i] : NULL;
    if (n > 0) {
        memcpy(tokens, b->tokens + (size_t)first * T, sizeof(int) * n * T);
        memcpy(targets, b->targets + (size_t)first * T, sizeof(int) * n * T);
        memcpy(begins, b->begins + (size_t)first * T, (size_t)n * T);
    }
}

/* The argument of hash_content when error_catch calls it. */
typedef struct {
    const Loader *loader;
    DataHashes content;
} Hashed;

static void hash_content(void *what)
{
    Hashed *s = what;
    s->content = loader_content(s->loader);
}

/* Describes a difference between ranks in the number of sequences or in hashed tokens, or an error
 * while reading; malloc'ed. NULL: no difference and no error. */
static char *disagreement(const Loader *l, const char *label)
{
    Hashed s = { l, { 0 } };
    char *own = error_catch(hash_content, &s), *problem = agree_problem(own);
    free(own);
    if (problem)
        return problem;
    const uint64_t value[] = { loader_fingerprint(l), s.content.tokens, s.content.masks };
    char *what = xasprintf("validation data for evaluator '%s'", label);
    char *found = comm_disagreement(what, hash_bytes(HASH_OF_NOTHING, value, sizeof value));
    free(what);
    return found;
}

/* Adds the set's numbers of tokens and files to sum[2], and a line to f. */
static void check_set(const Config *c, int i, FILE *f, uint64_t sum[2])
{
    watchdog_mark("opening validation data", -1);
    Loader *l = open_data(NULL, c, &c->eval[i]);
    char *problem = disagreement(l, c->eval[i].label);
    if (problem)
        die("%s", problem);
    fprintf(f, "validation: %s: %llu tokens from %d file%s\n", c->eval[i].label,
            (unsigned long long)loader_tokens(l), loader_files(l), loader_files(l) > 1 ? "s" : "");
    sum[0] += loader_tokens(l);
    sum[1] += (uint64_t)loader_files(l);
    loader_close(l);
}

char *evaluate_check(const Config *c)
{
    enum { LINES = 4 }; /* maximum number of lines, so that the header of a run fits on a screen */
    char *text;
    FILE *f = xtext(&text);
    uint64_t sum[2] = { 0 };
    int sets = 0;
    for (int i = 0; i < c->num_eval && (c->eval_interval > 0 || c->eval_on_load || c->eval_only);
         i++)
        if (c->eval[i].downstream)
            downstream_check(c, i);
        else {
            check_set(c, i, f, sum);
            sets++;
        }
    fclose(f);
    if (sets <= LINES)
        return text;
    free(text);
    return xasprintf("validation: %d sets, %llu tokens from %llu files\n", sets,
                     (unsigned long long)sum[0], (unsigned long long)sum[1]);
}

/* A micro-batch on the host, with arrays (B, T); whether attention stays inside documents; and sums
 * over all batches so far. */
typedef struct {
    int B, T, *tokens, *targets;
    uint8_t *begins;
    const void **images;
    bool divides;
    double loss, labels;
    /* preference pairs: whether the data have them, their reference (B, T), and sums */
    bool pairs;
    float *reference;
    double sum[NUM_PAIR_SUMS];
    ScoreSink sink; /* put NULL: the data are not scored */
} Validation;

static Validation validation_open(const Config *c, const Model *m)
{
    const size_t B = (size_t)m->text.attn.B, T = (size_t)m->text.T, N = B * T;
    return (Validation){ .B = (int)B,
                         .T = (int)T,
                         .tokens = xmalloc(N * sizeof(int)),
                         .targets = xmalloc(N * sizeof(int)),
                         .begins = xmalloc(N),
                         .images = xcalloc(N, sizeof(void *)),
                         .reference = xcalloc(N, sizeof(float)),
                         .divides = c->data.generate_doc_lengths };
}

static void validation_close(Validation *p)
{
    free(p->tokens);
    free(p->targets);
    free(p->begins);
    free(p->images);
    free(p->reference);
}

/* Sets the pairs of the micro-batch of sequences from `first` on, with b's scores as reference. */
static void use_pairs(Validation *p, const Batch *b, int first, Model *m)
{
    const size_t T = (size_t)p->T, n = b->sequences > first ? (size_t)(b->sequences - first) : 0;
    memset(p->reference, 0, (size_t)p->B * T * sizeof(float));
    if (n > 0)
        memcpy(p->reference, (const float *)b->values + (size_t)first * T,
               (n < (size_t)p->B ? n : (size_t)p->B) * T * sizeof(float));
    model_use_weights(m, (WeighedRows){ p->reference, 0, true });
}

static void add_batch(Validation *p, Loader *l, const Batch *b, int sequences, Model *m,
                      ParamStore *store)
{
    model_zero_losses(m);
    for (int first = 0; first < sequences; first += p->B) {
        watchdog_mark("evaluation", -1);
        micro_batch(p->tokens, p->targets, p->begins, p->images, b, first, p->B, p->T);
        if (b->images)
            model_use_images(m, (ImageRows){ p->images, b->images_f32 ? F32 : BF16 });
        if (p->pairs)
            use_pairs(p, b, first, m);
        model_micro_batch(m, store, p->tokens, p->targets, p->divides ? p->begins : NULL, 0, 0,
                          PASS_FORWARD);
        if (p->sink.put) {
            watchdog_mark_together("reading log-probabilities", -1);
            p->sink.put(p->sink.who, l, b, first, m);
        }
    }
    watchdog_mark_together("reading the validation losses", -1);
    p->loss += model_losses(m).loss;
    for (int i = 0; i < NUM_PAIR_SUMS; i++)
        p->sum[i] += m->pair_sums[i];
    p->labels += b->labels;
}

/* Evaluates until the data end, a rank is asked to stop (then returns true), or a rank has an error
 * in its data (then sets *problem). */
static bool add_batches(Validation *p, Loader *l, const char *label, const Config *c, Model *m,
                        ParamStore *store, const atomic_int *stop, char **problem)
{
    Batch b = { 0 };
    const long most_batches = p->sink.put ? -1 : c->eval_subset_num_batches,
               batches = (long)loader_steps(l, 0);
    const double all =
        (double)(most_batches >= 0 && most_batches < batches ? most_batches : batches);
    for (long n = 0; n != most_batches; n++) {
        progress_show((double)n / all, label);
        watchdog_mark("reading validation tokens", -1);
        watchdog_wait_for(WORKER_VALIDATION);
        const char *wrong = loader_problem(l);
        if (wrong || !loader_next(l, &b))
            b = (Batch){ 0 };
        watchdog_wait_for(NO_WORKER);
        /* maxima over ranks: number of sequences; whether to stop; whether there is an error */
        double most[3] = { b.sequences, stop && *stop, wrong != NULL };
        comm_max(most, 3);
        if (most[2] > 0)
            *problem = agree_problem(wrong);
        if (most[1] > 0 || most[2] > 0 || most[0] == 0)
            return most[1] > 0;
        add_batch(p, l, &b, (int)most[0], m, store);
    }
    return false;
}

/* Finds the reference of preference pairs. Returns a message, malloc'ed; NULL: no problem. */
static char *find_reference(Loader *l, const Config *c)
{
    const PreferenceLoss *loss = preference_loss(c->preference.kind);
    char *folder = reference_folder(c);
    char *problem = loss->reference && !reference_use(l, c, folder, false)
                        ? xasprintf("no log-probabilities of the reference model in %s", folder)
                        : NULL;
    free(folder);
    return problem;
}

EvalResult evaluate(const Config *c, int i, Model *m, ParamStore *store, const atomic_int *stop)
{
    char *own;
    watchdog_mark("opening validation data", -1);
    Loader *l = open_data(&own, c, &c->eval[i]);
    EvalResult e = { .label = c->eval[i].label, .loss = NAN, .problem = agree_problem(own) };
    free(own);
    if (!e.problem)
        e.problem = disagreement(l, e.label);
    if (!e.problem && c->eval[i].pairs)
        e.problem = find_reference(l, c);
    if (!e.problem) {
        Validation p = validation_open(c, m);
        p.pairs = c->eval[i].pairs;
        progress_begin("evaluating");
        e.cut = add_batches(&p, l, e.label, c, m, store, stop, &e.problem);
        progress_end();
        double total[2] = { p.loss, comm_group_rank(RANKS_SEQUENCE) == 0 ? p.labels : 0 };
        comm_sum(total, 2);
        comm_sum(p.sum, NUM_PAIR_SUMS);
        memcpy(e.pairs, p.sum, sizeof e.pairs);
        if (total[1] > 0)
            e.loss = total[0] / total[1];
        e.labels = (long)total[1];
        validation_close(&p);
    }
    if (l)
        loader_close(l);
    return e;
}

void evaluate_scores(ScoreSink sink, Loader *l, const Config *c, Model *m, ParamStore *store)
{
    char *problem = NULL;
    Validation p = validation_open(c, m);
    p.sink = sink;
    progress_begin("scoring");
    add_batches(&p, l, "log-probabilities", c, m, store, NULL, &problem);
    progress_end();
    if (problem)
        die("%s", problem);
    validation_close(&p);
}

double evaluate_pair_loss(const double pairs[NUM_PAIR_SUMS], const Preference *p)
{
    const double labels = fmax(pairs[PAIR_LABELS], 1);
    return pairs[PAIR_LOSS] / pairs[PAIR_COUNT] + p->sft_weight * pairs[PAIR_NLL] / labels;
}
