/* A choice is scored by the log-probabilities of its continuation's tokens given its context. A
 * sequence is filled with choices; each choice is a document. Ranks get micro-batches of sequences
 * in round-robin order. All ranks run the same number of passes, because gathering units is
 * collective: a rank without sequences runs masked sequences. */
#include "model/evaluate/downstream.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/hash.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/watchdog_marks.h"
#include "kernels/runtime/agree.h"
#include "model/evaluate/open_data.h"

/* A micro-batch (B, T) on the host. shown: the features of images; NULL: no images. images: a row
 * of features for each token. */
typedef struct {
    int B, T, *tokens, *targets;
    uint8_t *begins;
    float *losses;
    const ShownImages *shown;
    const void **images;
} Rows;

/* A hash of all questions and of the scoring method. */
static uint64_t task_hash(const Requests *r)
{
    uint64_t h = hash_bytes(hash_bytes(HASH_OF_NOTHING, r->name, strlen(r->name)), r->token,
                            sizeof *r->token * r->tokens);
    for (int i = 0; i < r->choices; i++) {
        const Choice *c = &r->choice[i];
        const int value[] = { c->length, c->scored, c->characters, c->bytes };
        h = hash_bytes(h, value, sizeof value);
    }
    for (int i = 0; i < r->questions; i++) {
        const int value[] = { r->question[i].first, r->question[i].count, r->question[i].gold };
        h = hash_bytes(h, value, sizeof value);
    }
    return hash_bytes(hash_bytes(h, r->image, sizeof *r->image * r->images), &r->metric,
                      sizeof r->metric);
}

/* The questions of a task, and the features of their images; NULL: no images. */
typedef struct {
    Requests requests;
    ShownImages *shown;
} Task;

static void close_task(Task *t)
{
    shown_images_close(t->shown);
    requests_free(&t->requests);
}

/* The argument of read_task when error_catch calls it. */
typedef struct {
    const Config *config;
    int number;
    Task task;
} Reading;

static void read_task(void *what)
{
    Reading *r = what;
    Task *t = &r->task;
    const EvalSet *set = &r->config->eval[r->number];
    const ModelConfig *m = &r->config->model;
    const char *folder = set->files.image_features;
    const TokenLimits limits = { m->vocab_size, m->max_sequence_length, m->image.token_id,
                                 m->image.feature_size > 0 ? m->image.rows : 0,
                                 folder ? NULL
                                        : "give them as data.image_features of the evaluator" };
    t->requests = requests_read(set->where, set->files.paths[0], &limits);
    if (folder)
        t->shown = shown_images_open(set->where, folder, m->image.rows, m->image.feature_size,
                                     t->requests.image, t->requests.images);
    if (t->shown)
        shown_images_check_tower(t->shown, tower_of(r->config), tower_folder(r->config), true);
}

/* Reads the file on all ranks. *problem: the error of a rank; NULL: no rank has an error. */
static Task open_task(char **problem, const Config *c, int i)
{
    Reading r = { c, i, { { 0 }, NULL } };
    watchdog_set_patient(true);
    watchdog_mark("reading questions", -1);
    char *own = error_catch(read_task, &r);
    watchdog_set_patient(false);
    *problem = agree_problem(own);
    free(own);
    if (*problem)
        return r.task;
    char *what =
        xasprintf("questions of evaluator '%s' (%s)", c->eval[i].label, c->eval[i].files.paths[0]);
    const uint64_t value[] = { task_hash(&r.task.requests),
                               r.task.shown ? shown_images_id(r.task.shown) : 0 };
    *problem = comm_disagreement(what, hash_bytes(HASH_OF_NOTHING, value, sizeof value));
    free(what);
    return r.task;
}

void downstream_check(const Config *c, int i)
{
    char *problem;
    Task t = open_task(&problem, c, i);
    if (problem)
        die("%s", problem);
    close_task(&t);
}

/* Returns the number of questions to ask, at least one. As in OLMo, each choice counts as one
 * sequence of a batch. */
static int questions_asked(const Config *c, const Requests *r)
{
    const double most = (double)c->eval_subset_num_batches * c->device_eval_batch_size *
                        comm_group_size(RANKS_DATA);
    int n = 1;
    if (c->eval_subset_num_batches < 0)
        return r->questions;
    while (n < r->questions && r->question[n].first + r->question[n].count <= most)
        n++;
    return n;
}

/* Returns the number of tokens of a choice that the model reads: all but the last; 0: an earlier
 * choice has the same tokens. */
static int tokens_read(const Requests *r, int choice)
{
    return r->choice[choice].same == choice ? r->choice[choice].length - 1 : 0;
}

int downstream_pack(int **first, const Requests *r, int questions, int T)
{
    const int choices = r->question[questions - 1].first + r->question[questions - 1].count;
    int sequences = 0, left = 0;
    *first = xmalloc(sizeof **first * (size_t)(choices + 1));
    for (int i = 0; i < choices; i++) {
        if (sequences == 0 || tokens_read(r, i) > left) {
            (*first)[sequences++] = i;
            left = T;
        }
        left -= tokens_read(r, i);
    }
    (*first)[sequences] = choices;
    return sequences;
}

/* Fills row b of the micro-batch with choices first .. end - 1; the padding is one more document.
 * image_id: the token of an image. */
static void lay(Rows *rows, int b, const Requests *r, int first, int end, int image_id)
{
    const size_t row = (size_t)b * (size_t)rows->T;
    int *tokens = rows->tokens + row, *targets = rows->targets + row, at = 0;
    memset(tokens, 0, sizeof(int) * (size_t)rows->T);
    memset(rows->begins + row, 0, (size_t)rows->T);
    for (int t = 0; t < rows->T; t++) {
        targets[t] = -1;
        rows->images[row + (size_t)t] = NULL;
    }
    for (int i = first; i < end; i++) {
        const Choice *c = &r->choice[i];
        const int n = tokens_read(r, i);
        if (n == 0)
            continue;
        rows->begins[row + (size_t)at] = 1;
        memcpy(tokens + at, r->token + c->first, sizeof(int) * (size_t)n);
        memcpy(targets + at + n - c->scored, r->token + c->first + c->length - c->scored,
               sizeof(int) * (size_t)c->scored);
        if (rows->shown)
            shown_images_rows(rows->images + row + at, rows->shown, tokens + at, n, image_id,
                              r->image + c->first_image);
        at += n;
    }
    if (at < rows->T)
        rows->begins[row + (size_t)at] = 1;
}

static void read_scores(double *log_probability, const Rows *rows, int b, const Requests *r,
                        int first, int end)
{
    const float *losses = rows->losses + (size_t)b * (size_t)rows->T;
    int at = 0;
    for (int i = first; i < end; i++) {
        const int n = tokens_read(r, i);
        for (int k = n > 0 ? n - r->choice[i].scored : 0; k < n; k++)
            log_probability[i] -= losses[at + k];
        at += n;
    }
}

/* Runs the micro-batch of sequences from number `s` on. There may be no sequences left. */
static void run_rows(Model *m, ParamStore *store, Rows *rows, const Requests *r, const int *first,
                     int sequences, long s, double *log_probability)
{
    for (int b = 0; b < rows->B; b++) {
        const bool any = s + b < sequences;
        lay(rows, b, r, any ? first[s + b] : 0, any ? first[s + b + 1] : 0,
            m->text.config->image.token_id);
    }
    watchdog_mark("evaluation", -1);
    if (rows->shown)
        model_use_images(m,
                         (ImageRows){ rows->images, shown_images_f32(rows->shown) ? F32 : BF16 });
    model_micro_batch(m, store, rows->tokens, rows->targets, rows->begins, 0, 0, PASS_FORWARD);
    watchdog_mark_together("reading the losses of tokens", -1);
    model_token_losses(m, rows->losses);
    for (int b = 0; b < rows->B && s + b < sequences; b++)
        read_scores(log_probability, rows, b, r, first[s + b], first[s + b + 1]);
}

/* Computes the log-probability of every choice, on all ranks. Returns false if a rank was asked to
 * stop. */
static bool log_probabilities(double *log_probability, const Task *task, int questions, Model *m,
                              ParamStore *store, const atomic_int *stop)
{
    const Requests *r = &task->requests;
    const int B = m->text.attn.B, T = m->text.T;
    const size_t N = (size_t)B * (size_t)T;
    const bool documents = m->text.documents;
    Rows rows = { B,
                  T,
                  xmalloc(sizeof(int) * N),
                  xmalloc(sizeof(int) * N),
                  xmalloc(N),
                  xmalloc(sizeof(float) * N),
                  task->shown,
                  xmalloc(sizeof *rows.images * N) };
    int *first, sequences = downstream_pack(&first, r, questions, T);
    bool cut = false;
    m->text.documents = true;
    progress_begin("evaluating");
    for (long s = 0; s < sequences && !cut; s += (long)B * comm_group_size(RANKS_DATA)) {
        progress_show((double)s / sequences, r->name);
        run_rows(m, store, &rows, r, first, sequences, s + (long)B * comm_group_rank(RANKS_DATA),
                 log_probability);
        cut = agree_any(stop && *stop);
    }
    progress_end();
    m->text.documents = documents;
    comm_sum(log_probability, r->choices);
    for (int i = 0; i < r->choices; i++)
        log_probability[i] = log_probability[r->choice[i].same];
    free(first);
    free(rows.tokens);
    free(rows.targets);
    free(rows.begins);
    free(rows.losses);
    free(rows.images);
    return !cut;
}

/* Returns the choice with the highest log-probability, normalized as `per` says. */
static int best_choice(const Choice *c, const double *p, int count, Metric per)
{
    int best = 0;
    double highest = -INFINITY;
    for (int k = 0; k < count; k++) {
        const double x =
            per == METRIC_ACC ? p[k] : p[k] / (c[k].characters + (per == METRIC_LEN_NORM_V2));
        if (x > highest) {
            highest = x;
            best = k;
        }
    }
    return best;
}

static bool all_known(const double *p, int count)
{
    for (int i = 0; i < count; i++)
        if (isnan(p[i]))
            return false;
    return true;
}

/* A diverged model gives NAN log-probabilities. Then the score is NAN, too: no choice is right or
 * wrong. */
void downstream_score(double score[NUM_METRICS], const Requests *r, int questions,
                      const double *log_probability)
{
    static const Metric choosing[] = { METRIC_ACC, METRIC_LEN_NORM, METRIC_LEN_NORM_V2 };
    for (int m = 0; m < NUM_METRICS; m++)
        score[m] = 0;
    for (int n = 0; n < questions; n++) {
        const Question *q = &r->question[n];
        const Choice *c = r->choice + q->first;
        const double *p = log_probability + q->first;
        for (int i = 0; i < 3; i++)
            score[choosing[i]] +=
                all_known(p, q->count) ? best_choice(c, p, q->count, choosing[i]) == q->gold : NAN;
        score[METRIC_BPB] -= p[q->gold] / M_LN2 / c[q->gold].bytes;
        score[METRIC_BPB_V2] -= p[q->gold] / M_LN2 / (c[q->gold].bytes + 1);
    }
    for (int m = 0; m < NUM_METRICS; m++)
        score[m] /= questions;
}

DownstreamResult downstream_evaluate(const Config *c, int i, Model *m, ParamStore *store,
                                     const atomic_int *stop)
{
    DownstreamResult d = { .label = c->eval[i].label };
    Task t = open_task(&d.problem, c, i);
    const Requests *r = &t.requests;
    if (d.problem) {
        close_task(&t);
        return d;
    }
    const int questions = questions_asked(c, r);
    d.metric = r->metric;
    d.questions = questions;
    double *log_probability = xcalloc((size_t)r->choices, sizeof *log_probability);
    d.cut = !log_probabilities(log_probability, &t, questions, m, store, stop);
    downstream_score(d.score, r, questions, log_probability);
    free(log_probability);
    close_task(&t);
    return d;
}
