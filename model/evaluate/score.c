#include "model/evaluate/score.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/evaluate/evaluate.h"
#include "model/evaluate/open_data.h"
#include "model/evaluate/reference.h"
#include "model/evaluate/soft_labels.h"
#include "model/evaluate/sum_over_ranks.h"

/* Log-probabilities of all tokens, and of a micro-batch. */
typedef struct {
    float *logps, *part;
} Logps;

static void put_logps(void *who, const Loader *l, const Batch *b, int first, const Model *m)
{
    const Logps *p = who;
    const int B = m->text.attn.B, T = m->text.T;
    model_token_losses(m, p->part);
    for (int i = 0; i < B * T; i++)
        p->part[i] = 0 - p->part[i];
    for (int i = 0; i < B && first + i < b->sequences; i++)
        loader_put_values(l, b, first + i, p->logps, p->part + (size_t)i * (size_t)T,
                          sizeof *p->part);
}

static void write_file(const char *path, const float *x, uint64_t count)
{
    char *part = xasprintf("%s.part", path);
    FILE *f = fopen(part, "wb");
    if (!f || fwrite(x, sizeof *x, count, f) != count || fflush(f) != 0 || fsync(fileno(f)) != 0 ||
        fclose(f) != 0 || rename(part, path) != 0)
        die("%s: cannot write %llu log-probabilities: %m", path, (unsigned long long)count);
    free(part);
}

/* Returns the path of the file; malloc'ed. */
static char *write_logps(const Config *c, Loader *l, Model *m, ParamStore *store,
                         const char *folder)
{
    const uint64_t count = loader_tokens(l);
    Logps p = { xcalloc(count, sizeof *p.logps),
                xmalloc(sizeof *p.part * (size_t)m->text.attn.B * (size_t)m->text.T) };
    char *path = reference_path(l, c, folder);
    evaluate_scores((ScoreSink){ put_logps, &p }, l, c, m, store);
    sum_over_ranks((uint32_t *)p.logps, count);
    if (comm_rank() == 0)
        write_file(path, p.logps, count);
    free(p.logps);
    free(p.part);
    return path;
}

static char *write_soft_labels(const Config *c, Loader *l, Model *m, ParamStore *store,
                               const char *folder)
{
    SoftWriter *w = soft_writer_open(l, c, folder);
    evaluate_scores((ScoreSink){ soft_writer_put, w }, l, c, m, store);
    return soft_writer_close(w);
}

void score_write(const Config *c, const EvalSet *set, Model *m, ParamStore *store,
                 const char *folder)
{
    Loader *l = open_data(NULL, c, set);
    const bool soft = c->score && c->top_k > 0;
    char *path = (soft ? write_soft_labels : write_logps)(c, l, m, store, folder);
    if (comm_rank() == 0) {
        printf("%s of %llu tokens of %s: %s\n", soft ? "soft labels" : "log-probabilities",
               (unsigned long long)loader_tokens(l), set->label, path);
        fflush(stdout);
    }
    comm_barrier();
    free(path);
    loader_close(l);
}
