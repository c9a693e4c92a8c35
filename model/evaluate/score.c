#include "model/evaluate/score.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/evaluate/evaluate.h"
#include "model/evaluate/open_data.h"
#include "model/evaluate/reference.h"

/* Sums the arrays of all ranks. Each token has a value on one rank, and 0 on all others. */
static void sum_over_ranks(float *x, uint64_t count)
{
    enum { PART = 1 << 16 };
    double *part = xmalloc(PART * sizeof *part);
    for (uint64_t at = 0; at < count; at += PART) {
        const int n = count - at < PART ? (int)(count - at) : PART;
        for (int i = 0; i < n; i++)
            part[i] = x[at + (uint64_t)i];
        comm_sum(part, n);
        for (int i = 0; i < n; i++)
            x[at + (uint64_t)i] = (float)part[i];
    }
    free(part);
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

void score_write(const Config *c, const EvalSet *set, Model *m, ParamStore *store,
                 const char *folder)
{
    Loader *l = open_data(NULL, c, set);
    const uint64_t count = loader_tokens(l);
    float *logps = xcalloc(count, sizeof *logps);
    char *path = reference_path(l, c, folder);
    evaluate_scores(logps, l, c, m, store);
    sum_over_ranks(logps, count);
    if (comm_rank() == 0) {
        write_file(path, logps, count);
        printf("log-probabilities of %llu tokens of %s: %s\n", (unsigned long long)count,
               set->label, path);
        fflush(stdout);
    }
    comm_barrier();
    free(path);
    free(logps);
    loader_close(l);
}
