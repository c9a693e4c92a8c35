/* Targets and repetitions in sequences, as OLMo defines them.
 *
 * A sequence has T tokens, not T + 1: targets are shifted inside the sequence, and its last
 * position has no target. The first token of a document is the target of the previous document's
 * last token, as in OLMo's training; only attention uses the boundaries. */
#include "data/sequence.h"

long sequence_targets(int *target, const int *token, const uint8_t *mask, int T, int padding)
{
    long labels = 0;
    for (int t = 0; t + 1 < T; t++) {
        bool masked = (mask && !mask[t + 1]) || (padding >= 0 && token[t + 1] == padding);
        target[t] = masked ? -1 : token[t + 1];
        labels += !masked;
    }
    target[T - 1] = -1;
    return labels;
}

void sequence_begins(uint8_t *begins, const int *token, int T, int eos)
{
    begins[0] = 1;
    for (int t = 1; t < T; t++)
        begins[t] = eos >= 0 && token[t - 1] == eos;
}

/* token[t] == token[t - p] for r consecutive tokens means that r + p tokens have period p, so the
 * n-gram occurs floor((r + p) / p) times. OLMo (find_periodic_sequences) does not detect fewer than
 * three occurrences. */
bool sequence_repeats(const int *token, int T, int min_period, int max_period, int max_count)
{
    int count = max_count < 3 ? 3 : max_count;
    for (int p = min_period; p <= max_period; p++) {
        int run = 0, needed = (count - 1) * p;
        for (int t = p; t < T; t++) {
            run = token[t] == token[t - p] ? run + 1 : 0;
            if (run >= needed)
                return true;
        }
    }
    return false;
}
