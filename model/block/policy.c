#include "model/block/policy.h"

#include <math.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "model/block/weights.h"

/* The end of the document that begins at t; *labels: the number of its labels. */
static int document(double *labels, const int *targets, const uint8_t *begins, int t, int T)
{
    *labels = 0;
    do
        *labels += targets[t++] >= 0;
    while (t < T && !begins[t]);
    return t;
}

PolicyCount policy_count(const int *targets, const uint8_t *begins, int sequences, int T)
{
    PolicyCount n = { 0 };
    double labels;
    for (int i = 0; i < sequences; i++, targets += T, begins += T)
        for (int t = 0; t < T; n.labels += labels, n.documents += labels > 0)
            t = document(&labels, targets, begins, t, T);
    return n;
}

double policy_terms(const Policy *p, PolicyCount n)
{
    return fmax(p->denominator == PER_TOKEN      ? n.labels
                : p->denominator == PER_SEQUENCE ? n.documents
                                                 : n.documents * p->constant,
                1);
}

static void add_metrics(double *sum, const PolicyLoss *l, double factor, double entropy)
{
    sum[POLICY_LABELS] += 1;
    sum[POLICY_LOSS] += factor * l->value;
    sum[POLICY_CLIPPED_LOW] += l->clipped_low;
    sum[POLICY_CLIPPED_HIGH] += l->clipped_high;
    sum[POLICY_RATIO] += l->ratio;
    sum[POLICY_IMPORTANCE] += l->importance;
    sum[POLICY_ENTROPY] += entropy;
    sum[POLICY_KL_OLD] += l->kl_old;
    sum[POLICY_KL_REFERENCE] += l->kl_reference;
    sum[POLICY_LARGEST_RATIO] = fmax(sum[POLICY_LARGEST_RATIO], l->ratio);
}

/* The document at tokens [begin, end) of the micro-batch. */
static void weigh_document(Model *m, size_t begin, size_t end, double labels)
{
    const size_t N = (size_t)m->text.N;
    const float *losses = m->weighed.host, *entropies = losses + N;
    float *weight = m->weighed.host + 2 * N;
    const double factor = m->policy.denominator == PER_SEQUENCE ? 1 / labels : 1;
    for (size_t t = begin; t < end; t++) {
        if (m->weighed.targets[t] < 0)
            continue;
        const PolicyLoss l =
            policy_loss(&m->policy, -losses[t], m->weighed.values + POLICY_VALUES * t);
        weight[t] = (float)(-factor * l.slope); /* cross entropy is minus the log-probability */
        add_metrics(m->policy_sums, &l, factor, entropies[t]);
    }
}

float policy_weigh(Model *m)
{
    const WeighedLabels *w = &m->weighed;
    const int T = m->text.T;
    const size_t N = (size_t)m->text.N;
    if (!w->targets) /* a rehearsal */
        return 1;
    device_get(w->host, m->losses, 2 * N * sizeof *w->host);
    memset(w->host + 2 * N, 0, N * sizeof *w->host);
    for (size_t at = 0; at < N; at += (size_t)T)
        for (int t = 0, begin = 0; t < T; begin = t) {
            double labels;
            t = document(&labels, w->targets + at, w->begins + at, t, T);
            weigh_document(m, at + (size_t)begin, at + (size_t)t, labels);
        }
    return weights_put(m);
}
