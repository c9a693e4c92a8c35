/* What the host computes from a batch while the device is busy: the tokens sorted by their row of
 * the embedding table, by a counting sort, and the starts of the documents. */
#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"

void sort_tokens(TokenAt *sorted, const int *tokens, int N, int V)
{
    int *next = xcalloc((size_t)V + 1, sizeof *next); /* [v]: the next index of token v */
    for (int n = 0; n < N; n++) {
        CHECK(tokens[n] >= 0 && tokens[n] < V, "token %d at %d; the embedding has %d rows",
              tokens[n], n, V);
        next[tokens[n] + 1]++;
    }
    for (int v = 1; v < V; v++)
        next[v] += next[v - 1];
    for (int n = 0; n < N; n++)
        sorted[next[tokens[n]]++] = (TokenAt){ tokens[n], n };
    free(next);
}

int document_starts(int *start, int *longest, const uint8_t *begins, int B, int T)
{
    const int N = B * T;
    int count = 0;
    *longest = 0;
    for (int n = 0; n <= N; n++) {
        const bool begin = n % T == 0 || (begins && begins[n]);
        if (!begin)
            continue;
        if (count > 0 && n - start[count - 1] > *longest)
            *longest = n - start[count - 1];
        start[count++] = n;
    }
    return count - 1;
}
