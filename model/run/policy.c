#include "model/run/policy.h"

#include <math.h>
#include <string.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"

double policy_step_terms(Run *r)
{
    const Batch *b = &r->batch;
    /* ranks that share sequences count them once */
    r->policy = comm_group_rank(RANKS_SEQUENCE) == 0
                    ? policy_count(b->targets, b->begins, b->sequences, r->model.text.T)
                    : (PolicyCount){ 0 };
    double x[2] = { r->policy.documents, r->policy.labels };
    comm_sum(x, 2);
    r->policy = (PolicyCount){ x[0], x[1] };
    return policy_terms(&r->config->policy, r->policy);
}

WeighedRows policy_rows(const Run *r, const Batch *b)
{
    const float *values = b->values;
    const bool reference = r->config->policy.beta > 0;
    const size_t tokens = (size_t)b->sequences * (size_t)r->model.text.T;
    for (size_t i = 0; i < tokens; i++, values += POLICY_VALUES) {
        if (b->targets[i] < 0)
            continue;
        if (!isfinite(values[POLICY_ADVANTAGE]))
            die("step %ld: a label has no advantage (the first of the numbers in *.policy.f32)",
                r->state.step + 1);
        if (reference && !isfinite(values[POLICY_REFERENCE]))
            die("step %ld: a label has no log-probability under the reference model (the fourth of "
                "the numbers in *.policy.f32), which policy.beta needs",
                r->state.step + 1);
    }
    return (WeighedRows){ b->values, 0, true };
}

double policy_step(Run *r)
{
    memcpy(r->policy_sums, r->model.policy_sums, sizeof r->policy_sums);
    comm_sum(r->policy_sums, POLICY_LARGEST_RATIO);
    comm_max(&r->policy_sums[POLICY_LARGEST_RATIO], 1);
    return r->policy_sums[POLICY_LOSS] / policy_terms(&r->config->policy, r->policy);
}
